"""A process's place in the job, from what each launcher puts in the environment."""

from __future__ import annotations

import pytest

from dear.comm.environment import RankFacts, rank_facts
from dear.errors import UserError

ALONE = RankFacts(launcher="none", rank=0, world_size=1, local_rank=0, local_world_size=1)

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS_PER_NODE": "4",
}
LAUNCHERS = {"torchrun": TORCHRUN, "Open MPI": OPEN_MPI, "MPICH": MPICH, "Slurm": SLURM}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_facts_of_each_launcher(launcher):
    assert rank_facts(LAUNCHERS[launcher]) == RankFacts(
        launcher=launcher, rank=5, world_size=8, local_rank=1, local_world_size=4
    )


SCRIPT = {key: value for key, value in SLURM.items() if key != "SLURM_STEP_ID"}


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"WORLD_SIZE": "1", "LOCAL_RANK": "3"},
        SCRIPT | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
    ],
    ids=["nothing", "a leftover", "a Slurm batch script"],
)
def test_a_process_that_nobody_launched_is_a_world_of_one(env):
    assert rank_facts(env) == ALONE


def test_alone_in_a_slurm_job_of_several_tasks_is_refused():
    with pytest.raises(UserError, match=r"gave this job 8 tasks.* srun") as caught:
        rank_facts(SCRIPT | {"SLURM_PROCID": "0"})
    assert "\n" not in str(caught.value)
    on_purpose = SCRIPT | {"RANK": "0", "WORLD_SIZE": "1"}
    assert rank_facts(on_purpose).world_size == 1


def test_torchrun_inside_a_slurm_step_counts():
    facts = rank_facts(SLURM | TORCHRUN | {"RANK": "2"})
    assert (facts.launcher, facts.rank) == ("torchrun", 2)


def test_one_host_only_if_all_ranks_are_local():
    facts = rank_facts({"RANK": "1", "WORLD_SIZE": "3"})
    assert (facts.local_rank, facts.local_world_size) == (1, 3)
    assert facts.one_host and ALONE.one_host
    assert not rank_facts(TORCHRUN).one_host
    assert rank_facts(TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}).one_host


@pytest.mark.parametrize("env", LAUNCHERS.values(), ids=LAUNCHERS)
def test_a_value_that_is_no_number_is_named(env):
    for name in env:
        if name == "SLURM_STEP_ID":
            continue
        with pytest.raises(UserError, match=rf"\b{name}='four'") as caught:
            rank_facts(env | {name: "four"})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("env", LAUNCHERS.values(), ids=LAUNCHERS)
def test_a_missing_world_size_is_named(env):
    _, size = [name for name in env if name != "SLURM_STEP_ID"][:2]
    with pytest.raises(UserError, match=rf"\b{size}=''"):
        rank_facts({key: value for key, value in env.items() if key != size})


@pytest.mark.parametrize("env", LAUNCHERS.values(), ids=LAUNCHERS)
@pytest.mark.parametrize("rank", ["8", "9", "-1"])
def test_a_rank_outside_its_world_is_refused(env, rank):
    name, size = [name for name in env if name != "SLURM_STEP_ID"][:2]
    with pytest.raises(UserError, match=name) as caught:
        rank_facts(env | {name: rank})
    assert size in str(caught.value)
    assert f"rank {rank} of 8" in str(caught.value)


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


@pytest.mark.parametrize(("tasks", "local"), [("4(x2)", 4), ("5,3", 3), ("2,4(x2)", 4)])
def test_a_slurm_step_over_several_hosts_is_not_one_host(tasks, local):
    # srun -N2 -n8: SLURM_NTASKS_PER_NODE is set only where the user asked for a number per node.
    step = {key: value for key, value in SLURM.items() if key != "SLURM_NTASKS_PER_NODE"}
    facts = rank_facts(step | {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": "1"})
    assert not facts.one_host
    assert facts.local_world_size == local


def test_a_slurm_step_may_be_smaller_than_its_allocation():
    # sbatch --ntasks-per-node=4, then srun -n2: the number per node is that of the allocation.
    step = {"SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    facts = rank_facts(SLURM | step | {"SLURM_PROCID": "1"})
    assert (facts.world_size, facts.local_world_size) == (2, 2)
    assert facts.one_host


def test_slurm_with_pmi2_takes_the_place_on_the_host_from_slurm():
    # srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE, but not MPICH's variables of the place.
    facts = rank_facts(SLURM | {"PMI_RANK": "5", "PMI_SIZE": "8"})
    assert (facts.rank, facts.world_size) == (5, 8)
    assert (facts.local_rank, facts.local_world_size) == (1, 4)


def test_the_process_environment_is_read_by_default(monkeypatch):
    for env in LAUNCHERS.values():
        for name in env:
            monkeypatch.delenv(name, raising=False)
    assert rank_facts() == ALONE
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    assert rank_facts().launcher == "Open MPI"
