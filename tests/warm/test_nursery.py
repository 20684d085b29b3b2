"""What a template is made of, when there is none, and which processes it does not stand for."""

from __future__ import annotations

import ctypes
import os
import runpy
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from deepspeed_ucp.warm import handover, nursery, process
from deepspeed_ucp.warm.nursery import Nursery
from tests.supervise.standins import is_running, wait_until
from tests.warm.kit import IS_WARM, LONGEST, ROOT, TELL, Kit, build


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a template's process has, in this one."""
    for name in ("handover", "process"):  # it loads them again
        full = f"deepspeed_ucp.warm.{name}"
        monkeypatch.setitem(sys.modules, full, sys.modules[full])
    return runpy.run_path(str(Path(process.__file__).with_name("template.py")))


@pytest.fixture
def kit(tmp_path: Path) -> Iterator[Kit]:
    with build(tmp_path) as kit:
        yield kit


def test_what_a_rank_had_at_its_first_step_the_next_one_finds(kit: Kit) -> None:
    """Not what lies beside its script, nor what it has imported later; another node's template is the same."""
    kit.write("", "beside.py")
    kit.write("import sys; print('numpy' in sys.modules)\nimport numpy, beside\n" + TELL + "import wave")
    assert kit.run("script.py", variables={"LOCAL_RANK": "1"}).stdout == "False\n"
    assert not kit.nursery.wait_ready(0) and kit.nursery.recipe() is None  # of a node's first rank alone
    assert kit.run("script.py").stdout == "False\n"
    wait_until(lambda: kit.nursery.recipe() is not None)
    assert kit.nursery.wait_ready(LONGEST)
    recipe = kit.nursery.recipe()
    assert recipe is not None
    assert {"numpy", "numpy.linalg", "deepspeed_ucp"} <= {*recipe["modules"]}
    assert not {"beside", "__main__", "wave", "sitecustomize"} & {*recipe["modules"]}
    assert kit.run("script.py").stdout == "True\n"
    assert recipe["changes"]["PYTHONPATH"] == kit.environment()["PYTHONPATH"] and len(recipe["changes"]) < 6
    (made,) = kit.events
    assert made["event"] == "template" and made["modules"] > 100 and made["megabytes"] > 1
    other = Nursery(lambda *_, **__: None)
    try:
        other.learn({**recipe, "cwd": str(kit.folder)})
        assert other.wait_ready(LONGEST)
        assert kit.run("script.py", variables=other.environment()).stdout == "True\n"
    finally:
        other.close()


UNFIT = {
    "threads": ("import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()", {},
                "the import of torch starts threads"),
    "process": ("import subprocess\nkept = subprocess.Popen(['cat'], stdin=subprocess.PIPE)\nclass cuda: "
                "is_initialized = lambda: False", {}, "an import has started a process"),
    "GPU": ("class cuda: is_initialized = lambda: True", {}, "an import has touched the GPU"),
    "GPU in a fork": ("class cuda: is_initialized = lambda: False\nclass _C: _cuda_isInBadFork = lambda: True", {},
                      "a forked process cannot use the GPU"),
    "hangs": ("import time\nclass cuda: is_initialized = lambda: False\nclass _C: _cuda_isInBadFork = lambda: "
              "time.sleep(600)", {}, "a forked process hangs when it computes: an import ran a parallel operation"),
    "variable": ("", {"set": {"OMP_NUM_THREADS": "17"}}, "the script sets OMP_NUM_THREADS itself before it imports "
                 "what reads it: set it outside of the script"),
    "rank": ("import os\nos.environ.get('LOCAL_RANK')", {}, "torch reads LOCAL_RANK when it is imported"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "more", "reason"), UNFIT.values(), ids=UNFIT)
def test_a_template_that_cannot_be_had_is_told_of_once(
    kit: Kit, monkeypatch: pytest.MonkeyPatch, text: str, more: Any, reason: str
) -> None:
    """Here of stand-ins for torch; starts are fresh then."""
    if "hangs" in reason:
        monkeypatch.setattr(nursery, "_TRIAL", 0.5)
    kit.write(text or "class cuda: is_initialized = lambda: False", "torch.py")
    for _ in range(2):
        assert not kit.make("torch", **more)
    assert kit.events == [{"event": "template", "reason": f"{reason}: every start is a fresh one"}]
    kit.write(IS_WARM)
    assert kit.run("script.py").stdout == "False\n"


def test_a_package_that_takes_a_rank_from_the_environment_is_left_out(kit: Kit) -> None:
    kit.write("import os\nrank = os.environ.get('LOCAL_RANK')", "asks.py")
    kit.write(IS_WARM + "print('asks' in sys.modules)")
    kit.write("import asks", "brings.py")
    assert kit.make("asks", "brings", "wave")
    assert kit.find("without") == [["asks reads LOCAL_RANK when it is imported"]]
    assert kit.run("script.py").stdout == "True\nFalse\n"


def test_generators_of_imports_draw_something_else_in_each_process(kit: Kit) -> None:
    """Hugging Face's datasets names files by one; those with a seed draw as they do in a fresh one."""
    made = "free, fixed, also = random.Random(), random.Random(7), random.Random()\nalso.seed(8)"
    kit.write(f"import random\n{made}", "draws.py")
    kit.write("import draws; print(draws.free.random(), draws.fixed.random(), draws.also.random())")
    assert kit.make("draws")
    told = [kit.run("script.py", warm=warm).stdout.split() for warm in (False, True, True)]
    assert len({each[0] for each in told}) == 3 and len({tuple(each[1:]) for each in told}) == 1
    assert not kit.find("refused")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor")
def test_libraries_have_as_many_threads_as_a_rank_has_processors(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    one = [min(os.sched_getaffinity(0))]
    kit.write("import os\ncount = len(os.sched_getaffinity(0))", "threads.py")
    kit.write(IS_WARM + "import threads; print(threads.count)")
    for made, asked, told in ((None, one, "False\n1\n"), (one, one, "True\n1\n")):
        assert kit.make("threads", **({"affinity": made} if made else {}))
        assert kit.run("script.py", preexec_fn=partial(os.sched_setaffinity, 0, asked)).stdout == told
    kit.has_refused("another number of processors: 1")


def less_memory() -> None:
    Path("/proc/self/oom_score_adj").write_text("500")


def no_new_rights() -> None:
    assert ctypes.CDLL(None).prctl(38, 1, 0, 0, 0) == 0


def test_a_system_that_does_not_end_processes_with_their_parent_forks_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank would outlive its template."""
    monkeypatch.setattr(ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *_: -1))
    with pytest.raises(PermissionError):
        process.end_with(os.getppid())


def test_devices_that_are_counted_while_something_is_imported(kit: Kit) -> None:
    """As DeepSpeed does by torch; whether there are any has to be the same for a rank, which of them has not."""
    kit.write("import os\nos.getenv('CUDA_VISIBLE_DEVICES')", "deepspeed.py")
    kit.write("import os\nos.environ.get('CUDA_VISIBLE_DEVICES')", "counts.py")
    kit.write(IS_WARM)
    hidden = {**kit.environment(), "CUDA_VISIBLE_DEVICES": ""}
    for environment, asked in (
        ({**hidden, "CUDA_VISIBLE_DEVICES": "0,1"}, ("True", "False")),
        (hidden, ("False", "True")),
    ):
        assert kit.make("deepspeed", "counts", environment=environment)
        told = [kit.run("script.py", variables={"CUDA_VISIBLE_DEVICES": seen}).stdout for seen in ("1", "")]
        assert told == [f"{each}\n" for each in asked]
    assert kit.find("without")[0] == ["counts reads CUDA_VISIBLE_DEVICES when it is imported"]
    kit.has_refused("another value of CUDA_VISIBLE_DEVICES")


def test_what_a_template_does_not_stand_for_starts_by_itself(kit: Kit, tmp_path: Path) -> None:
    kit.write(IS_WARM)
    kit.write(IS_WARM, "other.py")
    (tmp_path / "there").mkdir()
    assert kit.make("wave")
    assert kit.run("script.py").stdout == "True\n"
    fresh: list[tuple[tuple[str, ...], dict[str, Any]]] = [
        (("script.py",), {"variables": {"OMP_NUM_THREADS": "3"}}),
        (("script.py",), {"flags": ("-X", "dev")}),
        ((str(tmp_path / "script.py"),), {"cwd": tmp_path / "there"}),
        (("other.py",), {}),
    ]
    for words, options in fresh:
        assert kit.run(*words, **options).stdout == "False\n"
    for place in (less_memory, no_new_rights):
        assert kit.run("script.py", preexec_fn=place).stdout == "False\n"
    assert kit.run("script.py", variables={"RANK": ""}).stdout == "False\n"  # no rank
    assert kit.run("-c", IS_WARM).stdout == "False\n"
    assert kit.run("script.py", variables={"RANK": "5", "MASTER_PORT": "1"}).stdout == "True\n"
    kit.has_refused(
        "another value of OMP_NUM_THREADS", "another options: ['-X', 'dev']", f"another cwd: {tmp_path / 'there'}",
        "another program: ['script', 'other.py']",
        "another user, group, namespace, control group, capability or oom_score_adj",
    )  # fmt: skip


def test_sources_that_have_changed_make_another_template(kit: Kit) -> None:
    kit.write("A = 1", "changes.py")
    kit.write(IS_WARM + "import changes; print(changes.A)")
    assert kit.make("changes")
    assert kit.run("script.py").stdout == "True\n1\n"
    kit.write("A = 20", "changes.py")
    wait_until(lambda: kit.run("script.py").stdout == "False\n20\n")
    kit.has_refused(f"{kit.folder / 'changes.py'} has changed")
    assert kit.make("changes")
    assert kit.run("script.py").stdout == "True\n20\n"


def test_sources_that_change_while_they_are_imported_make_another_template(kit: Kit) -> None:
    """Nobody knows which of both was imported."""
    kit.write("import os\nos.utime(__file__)", "changes.py")
    kit.write(IS_WARM)
    assert kit.make("changes")
    assert kit.run("script.py").stdout == "False\n"
    kit.has_refused(f"{kit.folder / 'changes.py'} has changed")


def test_who_has_the_whole_request_may_have_gone_before_the_next_call() -> None:
    """A program that ends at once would run twice: the process that handed itself over took that for a failure."""
    ours, theirs = socket.socketpair()

    class Quick(socket.socket):
        def sendmsg(self, *given: Any) -> int:
            sent = super().sendmsg(*given)
            theirs.close()
            return sent

    with Quick(fileno=ours.detach()) as connection:
        handover.send(connection, {"argv": []})


def test_modules_and_packages_that_come_later_are_found(kit: Kit) -> None:
    """Beside the script, on ``PYTHONPATH`` and among installed packages, as by a fresh process."""
    kit.write(IS_WARM)
    (kit.folder / "ahead" / "site-packages").mkdir(parents=True)
    ahead = {"PYTHONPATH": f"{kit.folder / 'ahead'}:{kit.folder}:{ROOT}:{kit.folder / 'ahead' / 'site-packages'}"}
    environment = {**kit.environment(), **ahead}
    assert kit.make("wave", "colorsys", environment=environment)
    assert kit.run("script.py", variables=ahead).stdout == "True\n"
    for place in ("wave.py", "ahead/colorsys.py", "ahead/site-packages/more.py"):
        path = kit.write("", place)
        wait_until(lambda: kit.run("script.py", variables=ahead).stdout == "False\n")
        path.unlink()
    there = [f"{kit.folder / name} is there, and a module" for name in ("wave.py", "ahead/colorsys.py")]
    kit.has_refused(
        *(f"{text} of that name was imported from elsewhere" for text in there),
        f"{kit.folder / 'ahead' / 'site-packages'} has changed",
    )


def test_variables_that_imports_read_and_the_script_sets(kit: Kit) -> None:
    """Here those that Python reads; others do no harm."""
    kit.write("import os\nos.environ.get('ASKED_FOR')", "asks.py")
    kit.write("import os\nos.environ['SET_HERE'] = os.environ.get('SET_HERE', '7')", "sets.py")
    assert kit.make(
        "asks", "sets", touched=["OTHER", "SET_HERE"], values={"OTHER": "-", "SET_HERE": handover.digest("7")}
    )
    assert not kit.make("asks", touched=["ASKED_FOR"], values={"ASKED_FOR": "1"})
    assert "the script sets ASKED_FOR itself" in kit.find("reason")[0]
    kit.write(
        "import os\nos.environ.update(OTHER='hf_token-of-a-script', TORCH_X='3')\ndel os.environ['GONE']\n" + TELL
    )
    kit.run("script.py", variables={"GONE": "1", "HF_TOKEN": "one-of-a-launcher", "PLAIN": "8"})
    wait_until(lambda: len(kit.find("reason")) == 2)
    recipe = kit.nursery.recipe()
    assert recipe is not None and (recipe["touched"], recipe["set"]) == (["GONE", "OTHER"], {"TORCH_X": "3"})
    assert recipe["changes"]["PLAIN"] == "8"
    assert "of-a-" not in str(recipe)  # other machines are told, and nobody encrypts that


def test_a_template_that_cannot_fork_lets_a_rank_start_by_itself(kit: Kit) -> None:
    """And the ranks that it has forked go on."""
    fails = "def fails():\n  if next(calls) == 2: raise BlockingIOError(11, 'no')\n  return fork()\n"
    kit.write(f"import os\nfork, calls = os.fork, iter(range(9))\n{fails}os.fork = fails", "fails.py")
    kit.write(IS_WARM + "import os, time\ntime.sleep(int(os.environ.get('MASTER_PORT', '0')))")
    assert kit.make("fails")
    with kit.start("script.py", MASTER_PORT="600") as front:
        assert front.stdout is not None and front.stdout.readline() == "True\n"
        assert kit.run("script.py").stdout == "False\n"
        assert kit.run("script.py").stdout == "True\n"
        assert front.poll() is None
    kit.has_refused("no process can be forked: no")


def test_another_template_leaves_the_ranks_of_the_one_before_alone(kit: Kit) -> None:
    kit.write("import os, time\nprint(os.getpid())\ntime.sleep(600)")
    assert kit.make()
    (before,) = kit.nursery.pids()
    with kit.start("script.py") as front:
        assert front.stdout is not None and front.stdout.readline()
        assert kit.make("wave")
        assert len(kit.nursery.pids()) == 2
        assert front.poll() is None
        front.kill()
    wait_until(lambda: before not in kit.nursery.pids())
    assert len(kit.nursery.pids()) == 1


def test_a_nursery_takes_its_templates_along(tmp_path: Path) -> None:
    with build(tmp_path) as kit:
        assert kit.make()
        (pid,) = kit.nursery.pids()
    assert not os.path.exists(f"/proc/{pid}")


def test_a_template_that_is_tried_takes_its_child_along(tmp_path: Path) -> None:
    with build(tmp_path) as kit:
        kit.write("class cuda: is_initialized = lambda: False\nclass _C:\n  def _cuda_isInBadFork():\n"
                  "    open('begun', 'w')\n    import time; time.sleep(600)", "torch.py")  # fmt: skip
        kit.nursery.learn(kit.describe("torch"))
        wait_until((tmp_path / "begun").exists)
        (pid,) = kit.nursery.pids()
        (child,) = psutil.Process(pid).children()
    wait_until(lambda: not is_running(child.pid))


def test_who_says_nothing_lets_nobody_wait(kit: Kit) -> None:
    """A process may stand still when it has come, and is heard later."""
    kit.write(IS_WARM)
    with kit.reach("learn") as late:
        assert kit.make()
        handover.send(late, {**kit.describe("wave"), "affinity": [*os.sched_getaffinity(0)]})
        wait_until(lambda: len(kit.events) == 2)
    assert kit.nursery.wait_ready(LONGEST)
    with kit.reach("start") as late:
        assert kit.run("script.py").stdout == "True\n"
        with pytest.raises(BlockingIOError):
            late.recv(1, socket.MSG_DONTWAIT)
        late.send(b"what is none")
        assert late.recv(1) == b""


def test_threads_that_are_ending_are_none(template: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The system lists one that has been joined for a moment more."""
    told = {"1": "1 (a) b) R 1 1 1 0 -1 4194560 0", "2": "2 (a) b) R 1 1 1 0 -1 4194564 0", "3": ""}
    monkeypatch.setattr(os, "listdir", lambda _: [*told])
    monkeypatch.setattr(template["handover"], "_read", lambda path: told[path.split("/")[-2]])
    assert template["_count_threads"]() == 1


def test_a_source_that_changes_within_a_tick_has_changed(template: dict[str, Any]) -> None:
    """The times of files are those of the system's last tick."""
    began = os.stat(process.__file__).st_ctime
    for later, changed in ((0.005, process.__file__), (1.0, None)):
        sources = template["Sources"](began + later)
        sources._stamps = {process.__file__: sources._stamps[process.__file__]}
        assert sources.find_changed() == changed
