"""Launcher of ranks on nodes that the user starts by hand, without ssh or a scheduler.

The user runs the same command on every node, each with another `node_rank`. Node 0 leads the sweep
and listens at the control port. The other nodes stay connected to node 0, and start ranks when it
asks. `python -m common.launch.nodes SECRET MASTER PORT nodeK HOST COMMAND` replaces the remote
shell of HOST: it waits until node K connects to the control port + K, and passes the command to it.

Whoever is taken for node 0 runs commands on the other nodes. So both ends of a connection prove
that they know a secret, which node 0 writes into a file that only its user can read. All nodes
share the folder of this file.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import json
import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from common.emulation.hosts.namespaces import die_with_parent
from common.launch.hosts import Host
from common.launch.job import ADMINISTRATIVE, Job
from common.launch.per_host import PortOptions
from common.launch.ssh import SshLauncher
from common.paths import LOGS
from dear.errors import UserError
from dear.options import at_least, positive

POLL_S = 0.2
CALL_S = 20.0
"""Longest time in seconds that a node may take to connect for a job."""
GREETING_S = 5.0
"""Longest time in seconds for one line of a greeting."""
_LONGEST_LINE = 1 << 20


class NodesLauncher(SshLauncher):
    """Launcher whose hosts are the connected nodes; each gets equally many ranks, in order."""

    @dataclass(frozen=True, kw_only=True)
    class Options(PortOptions):
        """Nodes, and the network between them."""

        nnodes: int = 1
        """Number of nodes."""
        node_rank: int = field(default=0, metadata=ADMINISTRATIVE)
        """Number of this node, 0 .. nnodes-1. Node 0 leads and keeps the records."""
        master: str = "127.0.0.1"
        """Name or address of node 0 for the others; the default is for nodes on one machine."""
        control_port: int = field(default=29400, metadata=ADMINISTRATIVE)
        """First of `nnodes` ports of node 0, to which the other nodes connect."""
        wait_s: float = field(default=600.0, metadata=ADMINISTRATIVE)
        """Longest time until all nodes have connected, in seconds."""

        def __post_init__(self) -> None:
            super().__post_init__()
            at_least("nnodes", self.nnodes, 1)
            positive("wait_s", self.wait_s)
            if not re.fullmatch(r"[\w.:-]+", self.master):
                raise UserError(f"master must be a name or an address, got {self.master!r}")
            if not 0 <= self.node_rank < self.nnodes:
                raise UserError(
                    f"node_rank must be in 0..{self.nnodes - 1} (nnodes={self.nnodes}), got "
                    f"{self.node_rank}"
                )
            if not 0 < self.control_port <= 65536 - self.nnodes:
                raise UserError(f"control_port must leave {self.nnodes} ports below 65536")

    def __init__(
        self,
        *,
        hosts: Sequence[Host] | None = None,
        options: Options,
        preload: Sequence[str] = (),
    ) -> None:
        if hosts is not None:
            raise UserError(
                "launcher nodes takes no hosts: it runs where each node was started (options "
                "nnodes, node_rank, master)"
            )
        ranks = range(options.nnodes)
        nodes = [Host(name=f"node{k}", slots=1, address=options.master) for k in ranks]
        super().__init__(hosts=nodes, options=options, preload=preload)
        self._links: dict[int, socket.socket] = {}

    def check(self) -> None:
        """Waits until all other nodes are connected."""
        options = self._options
        missing = set(range(1, options.nnodes))
        deadline = time.monotonic() + options.wait_s
        if not missing:
            return
        where = f"{options.master}, port {options.control_port}"
        print(f"waiting at {where} for node {_words(missing)}", file=sys.stderr)
        secret = _write_secret(self._secret_path)
        weakref.finalize(self, self._secret_path.unlink, missing_ok=True)
        with _listen(options.master, options.control_port) as server:
            while missing:
                server.settimeout(max(deadline - time.monotonic(), 0.01))
                try:
                    link = server.accept()[0]
                except TimeoutError:
                    raise UserError(
                        f"node {_words(missing)} of {options.nnodes} did not connect in "
                        f"{options.wait_s:g} s: start the same command there, with its node_rank"
                    ) from None
                node = self._admit(link, secret, missing)
                if node is not None:
                    self._links[node] = link
                    missing.remove(node)

    @property
    def _secret_path(self) -> Path:
        return LOGS / f".nodes-{self._options.master}-{self._options.control_port}"

    def _admit(self, link: socket.socket, secret: bytes, missing: set[int]) -> int | None:
        """Returns the number of a node that connects; None for others. Nodes of this job are told
        the reason."""
        _keep_alive(link)
        pattern = r"node (\d+) of (\d+)"
        words = re.fullmatch(pattern, greeting(link, secret, pattern) or "")
        if words is None:
            link.close()  # a stranger
        elif int(words[2]) != self._options.nnodes:
            _send_away(link, f"node 0 has nnodes={self._options.nnodes}, this node {words[2]}")
        elif int(words[1]) not in missing:
            _send_away(link, f"node_rank={words[1]} is there already; each node needs its own")
        else:
            return int(words[1])
        return None

    def follow(self) -> int:
        """Runs the commands of node 0 until node 0 ends; returns the exit status.

        Raises:
            UserError: node 0 does not answer, or does not expect this node.
        """
        options = self._options
        deadline = time.monotonic() + options.wait_s
        words = f"node {options.node_rank} of {options.nnodes}"
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            with self._call(options.control_port, left_s) as lead:
                secret = _read_secret(self._secret_path)
                if secret is not None and greet(lead, secret, words):
                    return self._obey(lead, secret)
            if time.monotonic() >= deadline:
                raise UserError(
                    f"the program at {options.master}, port {options.control_port} does not know "
                    f"the secret in {self._secret_path}: is it node 0 of another job, or do the "
                    "nodes not share this folder?"
                )
            time.sleep(POLL_S)  # node 0 may be about to write the secret

    def _obey(self, lead: socket.socket, secret: bytes) -> int:
        """Runs commands until the link `lead` to node 0 ends."""
        options = self._options
        while True:
            if select.select([lead], [], [], POLL_S)[0]:
                reason = _line(lead)
                if reason:
                    raise UserError(reason)
                return 0
            try:
                link = self._call(options.control_port + options.node_rank, 0.0)
            except UserError:
                continue  # no job yet
            with link:
                if greet(link, secret, f"node{options.node_rank}"):
                    _serve(link)

    def _call(self, port: int, patience_s: float) -> socket.socket:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                link = socket.create_connection((self._options.master, port), timeout=CALL_S)
            except OSError as error:
                if time.monotonic() >= deadline:
                    raise UserError(
                        f"node 0 does not answer at {self._options.master}, port {port}: {error}; "
                        "was it started, with the same master and control_port?"
                    ) from None
                time.sleep(POLL_S)
                continue
            _keep_alive(link)
            return link

    def _hosts_of(self, job: Job) -> list[Host]:
        slots = -(-job.world_size // self._options.nnodes)
        return [replace(host, slots=slots) for host in self._hosts]

    def _agent_for(self, host: Host) -> list[str] | None:
        if host.name == "node0":
            return None
        place = [str(self._secret_path.resolve()), self._options.master]
        place += [str(self._options.control_port)]
        return [sys.executable, "-m", "common.launch.nodes", *place, host.name]


def main(argv: Sequence[str]) -> int:
    """Passes a command to the node that connects for it; returns the command's exit status."""
    path, master, port, name, _, command = argv
    deadline = time.monotonic() + CALL_S
    secret = _read_secret(Path(path))
    if secret is None:
        print(f"no secret in {path}: has node 0 ended?")
        return 255
    with _listen(master, int(port) + int(name.removeprefix("node"))) as server:
        while True:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                link = server.accept()[0]
            except TimeoutError:
                print(f"{name} did not connect within {CALL_S:g} s: has it ended?")
                return 255
            _keep_alive(link)
            if greeting(link, secret, name):
                break
            link.close()
    with link:
        link.sendall(f"{json.dumps(command)}\n".encode())  # it may have several lines
        return _relay(link)


def _write_secret(path: Path) -> bytes:
    """Returns a new secret, which it has written into a file that only this user can read."""
    secret = secrets.token_bytes(32)
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secret)
    new.replace(path)
    return secret


def _read_secret(path: Path) -> bytes | None:
    """Returns the secret of the file; None if there is none yet.

    Raises:
        UserError: another user owns the file or can read it.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise UserError(f"{path}: must belong to you, and nobody else may read it")
            return file.read()
    except FileNotFoundError:
        return None


def greet(link: socket.socket, secret: bytes, words: str) -> bool:
    """Sends words to node 0; returns whether both ends have proved that they know the secret."""
    nonce = secrets.token_hex(16)
    try:
        link.sendall(f"{words} {nonce}\n".encode())
        challenge, _, theirs = _line(link, GREETING_S).partition(" ")
        if not _is_proof(theirs, secret, "lead", words, nonce, challenge):
            return False
        link.sendall(f"{_proof(secret, 'node', words, nonce, challenge)}\n".encode())
    except OSError:
        return False
    return True


def greeting(link: socket.socket, secret: bytes, pattern: str) -> str | None:
    """Returns the words that the other end sends by `greet`; None if they do not match `pattern`
    or it does not know the secret.

    It proves nothing to others: a stranger could pass on the proof to a node that waits elsewhere.
    """
    words, _, nonce = _line(link, GREETING_S).rpartition(" ")
    if re.fullmatch(pattern, words) is None:
        return None
    challenge = secrets.token_hex(16)
    try:
        link.sendall(f"{challenge} {_proof(secret, 'lead', words, nonce, challenge)}\n".encode())
    except OSError:
        return None
    right = _is_proof(_line(link, GREETING_S), secret, "node", words, nonce, challenge)
    return words if right else None


def _proof(secret: bytes, side: str, *texts: str) -> str:
    return hmac.new(secret, "\n".join((side, *texts)).encode(), hashlib.sha256).hexdigest()


def _is_proof(given: str, secret: bytes, side: str, *texts: str) -> bool:
    return hmac.compare_digest(given.encode(), _proof(secret, side, *texts).encode())


def _relay(link: socket.socket) -> int:
    """Forwards standard input to the command and its output to standard output; returns its exit
    status."""
    sources: list[socket.socket | int] = [link, 0]
    held = b""  # the end of the output, which may be the status
    while True:
        ready = select.select(sources, [], [])[0]
        if 0 in ready:
            text = os.read(0, 4096)
            if text:
                link.sendall(text)
            else:
                sources.remove(0)
                link.shutdown(socket.SHUT_WR)
        if link in ready:
            text = link.recv(65536)
            if not text:
                break
            held += text
            os.write(1, held[:-16])
            held = held[-16:]
    ended = re.search(rb"\nexit (\d+)\n$", held)
    os.write(1, held[: ended.start()] if ended else held + b"\nthe connection was lost\n")
    return int(ended[1]) if ended else 255


def _serve(link: socket.socket) -> None:
    """Runs one command of node 0; the link is its standard input and output."""
    text = _line(link)
    if not text:
        return  # node 0 has stopped the job
    command = json.loads(text)
    ends = functools.partial(die_with_parent, signal.SIGTERM)
    done = subprocess.run(
        ["sh", "-c", command], stdin=link, stdout=link, stderr=link, preexec_fn=ends
    )
    try:
        link.sendall(f"\nexit {done.returncode}\n".encode())
    except OSError:
        return  # node 0 has stopped the job


def _listen(master: str, port: int) -> socket.socket:
    """Listens at the address `master` if it is a loopback address, else at all: the name of this
    node may have another address here than on the other nodes."""
    try:
        if master in ("localhost", "::1") or master.startswith("127."):
            family = socket.AF_INET6 if ":" in master else socket.AF_INET
            return socket.create_server((master, port), family=family)
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise UserError(f"control_port: cannot open port {port}: {error.strerror}") from None


def _keep_alive(link: socket.socket) -> None:
    """Makes a network failure end the connection within a minute."""
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 3)):
        link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _line(link: socket.socket, limit_s: float = CALL_S) -> str:
    """Reads up to the end of a line; empty if the peer has closed, or the line takes too long."""
    deadline = time.monotonic() + limit_s
    text = b""
    try:
        while not text.endswith(b"\n"):
            link.settimeout(max(deadline - time.monotonic(), 0.001))
            byte = link.recv(1)
            if not byte or len(text) > _LONGEST_LINE:
                return ""
            text += byte
    except OSError:
        return ""
    link.settimeout(None)
    return text.decode(errors="replace").rstrip("\n")


def _send_away(link: socket.socket, reason: str) -> None:
    link.sendall(f"{reason}\n".encode())
    link.close()


def _words(nodes: set[int]) -> str:
    return ", ".join(map(str, sorted(nodes)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
