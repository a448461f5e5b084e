"""A process's place in the job, from what each launcher puts in the environment."""

from __future__ import annotations

import pytest

from dear.comm.environment import RankFacts, host_identity, placed, rank_facts
from dear.errors import UserError

ALONE = RankFacts(launcher="none", rank=0, world_size=1, local_rank=0, local_world_size=1)

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def named(prefix: str) -> dict[str, str]:
    """Variables of Open MPI and others, each with a prefix of its own."""
    values = {"RANK": "5", "SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}
    return {f"{prefix}_{name}": value for name, value in values.items()}


MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "4",
}
PALS = {"PALS_RANKID": "5", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4"}
LAUNCHERS = {
    "torchrun": TORCHRUN,
    "Open MPI": named("OMPI_COMM_WORLD"),
    "MVAPICH2": named("MV2_COMM_WORLD"),
    "MVAPICH": named("MVP_COMM_WORLD"),
    "jsrun": named("JSM_NAMESPACE"),
    "horovodrun": named("HOROVOD"),
    "PALS": PALS,
    "MPICH": MPICH,
    "Slurm": SLURM,
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_facts_of_each_launcher(launcher):
    facts = rank_facts(LAUNCHERS[launcher])
    place = {"rank": 5, "world_size": 8, "local_rank": 1, "local_world_size": 4}
    assert facts == RankFacts(launcher=launcher, **place) and not facts.one_host


SCRIPT = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"}


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"WORLD_SIZE": "1", "LOCAL_RANK": "3"},
        SCRIPT | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        SCRIPT | {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
        {"SLURM_ARRAY_TASK_ID": "7", "LORA_RANK": "8", "BATCH_SIZE": "4", "GROUP_SIZE": "9"},
    ],
    ids=["nothing", "a leftover", "a Slurm batch script", "an interactive step", "other numbers"],
)
def test_a_process_that_nobody_launched_is_a_world_of_one(env):
    assert rank_facts(env) == ALONE and ALONE.one_host
    assert rank_facts(env | TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}).one_host


STEP_OF_ONE = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"}


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"SLURM_STEP_ID": "4294967290", **STEP_OF_ONE},
        {"SLURM_STEP_ID": "0", **STEP_OF_ONE},  # an interactive shell of older Slurms
    ],
    ids=["batch", "interactive", "shell"],
)
def test_alone_in_a_slurm_job_of_several_tasks_is_refused(env):
    env = SCRIPT | env | {"SLURM_PROCID": "0"}
    with pytest.raises(UserError, match=r"gave this job 8 tasks.* srun") as caught:
        rank_facts(env)
    assert "\n" not in str(caught.value)
    assert rank_facts(env | {"RANK": "0", "WORLD_SIZE": "1"}).world_size == 1
    assert rank_facts(env | named("HOROVOD")).launcher == "horovodrun"


@pytest.mark.parametrize(
    "variable",
    [
        *("PMIX_RANK=0", "PMIX_RANK=1", "PMI_ID=0", "ALPS_APP_PE=0", "MP_CHILD=0"),
        *("MPIRUN_RANK=1", "NODE_RANK=1", "LOCAL_RANK=1", "GROUP_WORLD_SIZE=2", "PMI_SIZE=2"),
        *("DMLC_NUM_WORKER=4", "BYTEPS_LOCAL_SIZE=2", "NTASKS=4"),
    ],
)
def test_a_launcher_that_is_not_known_is_refused(variable):
    name, _, value = variable.partition("=")
    with pytest.raises(UserError, match=f"^{variable}: a launcher started several") as caught:
        rank_facts({name: value})
    assert "\n" not in str(caught.value)
    assert rank_facts({name: value, "RANK": "0", "WORLD_SIZE": "1"}).world_size == 1


FLUX = {"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "3", "FLUX_TASK_LOCAL_ID": "0", "PMI_RANK": "1"}


@pytest.mark.parametrize(
    ("env", "launcher", "local_rank"),
    [
        ({"RANK": "1", "WORLD_SIZE": "3"}, "torchrun", -1),
        ({"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1"}, "torchrun", 1),
        ({"PMI_RANK": "1", "PMI_SIZE": "3"}, "MPICH", -1),
        (FLUX | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, "Flux", 0),
    ],
)
def test_a_place_that_no_launcher_gives_is_left_open(env, launcher, local_rank):
    facts = rank_facts(env)
    assert (facts.launcher, facts.rank, facts.world_size) == (launcher, 1, 3)
    assert (facts.local_rank, facts.local_world_size, facts.one_host) == (local_rank, 0, False)
    assert facts.place == f"{host_identity()} {local_rank}"


@pytest.mark.parametrize(
    ("places", "local"),
    [
        (["a -1", "a -1", "a -1"], [(0, 3), (1, 3), (2, 3)]),
        (["a b -1", "a c -1", "a b -1"], [(0, 2), (0, 1), (1, 2)]),
        (["a 1", "a 0", "b 0"], [(1, 2), (0, 2), (0, 1)]),  # as the launcher has it
        (["a 0", "a 0", "b 7"], [(0, 2), (1, 2), (0, 1)]),  # no numbers of this host's ranks
    ],
)
def test_ranks_count_themselves_on_each_host(places, local):
    for rank, expected in enumerate(local):
        open_facts = RankFacts(
            launcher="MPICH", rank=rank, world_size=3, local_rank=-1, local_world_size=0
        )
        facts = placed(open_facts, places)
        assert (facts.local_rank, facts.local_world_size) == expected


@pytest.mark.parametrize("env", LAUNCHERS.values(), ids=LAUNCHERS)
def test_a_value_that_cannot_be_is_named(env):
    names = [name for name in env if name != "SLURM_STEP_ID"]
    rank, size = names[:2]
    cases = [(name, "four", [f"{name}='four'"]) for name in names]
    cases += [(rank, value, [rank, size, f"rank {value} of 8"]) for value in ("8", "9", "-1")]
    cases.append((size, "", [f"{size}=''"]))
    for name, value, words in cases:
        with pytest.raises(UserError) as caught:
            rank_facts({k: v for k, v in (env | {name: value}).items() if v})
        text = str(caught.value)
        assert all(word in text for word in words) and "\n" not in text


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"WORLD_SIZE": "8", "LOCAL_RANK": "3"}, "WORLD_SIZE=8, but RANK is not set"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, r"\bLOCAL_RANK\b"),
        (TORCHRUN | {"LOCAL_RANK": "-1"}, r"\bLOCAL_RANK\b"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "16"}, "LOCAL_WORLD_SIZE"),
    ],
)
def test_a_place_that_cannot_be_is_refused(env, words):
    with pytest.raises(UserError, match=words):
        rank_facts(env)


# srun -N2 -n8: SLURM_NTASKS_PER_NODE is set only where the user asked for a number per node.
STEP = {key: value for key, value in SLURM.items() if key != "SLURM_NTASKS_PER_NODE"}


@pytest.mark.parametrize(
    ("env", "launcher", "places"),
    [
        *(
            (STEP | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": "1"}, "Slurm", (8, local))
            for tasks, local in (("4(x2)", 4), ("5,3", 3), ("2,4(x2)", 4))
        ),
        # sbatch --ntasks-per-node=4, then srun -n2: the number per node is the allocation's.
        (
            SLURM
            | {"SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
            | {"SLURM_PROCID": "1"},
            "Slurm",
            (2, 2),
        ),
        # srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE, but not MPICH's variables of the place.
        (SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8"}, None, (8, 4)),
        (SLURM | TORCHRUN | {"RANK": "2"}, "torchrun", (8, 4)),
    ],
)
def test_a_step_of_slurm_knows_its_hosts(env, launcher, places):
    facts = rank_facts(env)
    assert launcher in (None, facts.launcher)
    assert (facts.world_size, facts.local_world_size) == places
    assert facts.one_host == (places[0] == places[1])


def test_the_process_environment_is_read_by_default(monkeypatch):
    for name in (name for env in LAUNCHERS.values() for name in env):
        monkeypatch.delenv(name, raising=False)
    assert rank_facts() == ALONE
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    assert rank_facts().launcher == "Open MPI"
