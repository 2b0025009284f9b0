"""One line from what Ray says of a dead actor."""

from mesh.cluster.ray_driver import exit_detail, exited_pid

KILLED = """The actor died unexpectedly before finishing this task.
\tclass_name: StageActor
\tactor_id: 0b3eee6496498d6ac951317901000000
\tpid: 21903
\tnamespace: spanmesh
\tip: 10.77.0.2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR \
Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. \
Some common causes include: (1) the process was killed by the OOM killer due to high memory usage, \
(2) ray stop --force was called."""
ORDERED = """The actor is dead.
\tpid: 7
Worker exit type: INTENDED_SYSTEM_EXIT Worker exit detail: Owner's node died."""
NODE = "The actor died because its node has died. Node Id: 1b\n\tthe actor's node was terminated unexpectedly"


def test_a_killed_process_is_told_apart_from_a_lost_node() -> None:
    assert exit_detail(KILLED).startswith("its process ended without a message")
    assert exit_detail(NODE) == "its host's Ray node ended"


def test_what_ray_knows_better_is_kept() -> None:
    assert exit_detail(ORDERED) == "Owner's node died"
    assert exit_detail("Something new.\nmore") == "Something new."
    assert exit_detail("") == "unknown reason"


def test_the_process_is_named() -> None:
    assert exited_pid(KILLED) == 21903
    assert exited_pid(NODE) is None
