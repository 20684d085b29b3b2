"""Sizes and structure of the package, to compare two commits (`make house`).

Nearly all figures come from parsed source; functions are measured without docstrings. The files and types of a resume
are counted in a real one: 2 ranks save at ZeRO 1, 3 ranks load, and each records the files of the package whose
functions run during `load_checkpoint`, and the classes whose methods run (`types`).
"""

import argparse
import ast
import configparser
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PACKAGE = "deepspeed_ucp"
SAVED_BY, LOADED_BY = 2, 3
IN_FUNCTION = 0x1
"""Flag of code objects of functions; modules and class bodies run when a file is imported."""

CONCEPTS = {
    "a byte range": """Answers Arrived Claim CopyItem Cut Elements Extent Extents Fragment Fragments Held Item Part
        Partitions PartitionedState Piece Read Request Row Run Shard Storage TensorRef Tile Tiles Want""",
    "an engine": """Buffer BufferSpec EngineBuffer EngineView HeldBuffer LiveBuffer LiveEngine Target TargetInventory
        TargetLayout""",
    "a file": """Entry FileBatch FileHeader FileRecord FileRef FileTable Listing Record Records RecordTable Save
        SaveFiles ReadableFile""",
}
"""Names of classes that describe the same thing, including past and planned ones, without a leading underscore."""

INVERTED = re.compile(r"(What|Who|Which|Of|The same)\b")
"""Beginning of a docstring without its own verb and noun."""


class Module:
    """A parsed file of the package. A package's file is `….__init__`, so that relative imports resolve."""

    def __init__(self, root: Path, file: Path) -> None:
        self.name = ".".join(file.relative_to(root).with_suffix("").parts)
        self.room = self.name.split(".")[1] if self.name.count(".") > 1 else "(root)"
        self.text = file.read_text()
        self.path, self.lines = str(file.relative_to(root / PACKAGE)), self.text.count("\n")
        self.nodes = list(ast.walk(ast.parse(self.text)))
        self.functions = [node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        self.classes = [node for node in self.nodes if isinstance(node, ast.ClassDef)]
        self.imports = {name for node in self.nodes for name in list_imported(node, self.name)}

    def list_docstrings(self) -> list[str]:
        nodes = [self.nodes[0], *self.classes, *self.functions]
        return [text for node in nodes if (text := ast.get_docstring(node)) is not None]


def measure_docstring(node: ast.AST) -> int:
    return 0 if ast.get_docstring(node, clean=False) is None else node.body[0].end_lineno - node.body[0].lineno + 1


def list_imported(node: ast.AST, module: str) -> list[str]:
    """Return the names that a node imports; relative ones are resolved."""
    if not isinstance(node, ast.ImportFrom):
        return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    outer = module.split(".")[: -node.level] if node.level else []
    return [".".join([*outer, *filter(None, [node.module]), alias.name]) for alias in node.names]


def link(modules: list[Module]) -> dict[str, set[str]]:
    """Return the imports of each module: `a.b.c` may be the module c, the package c, or a name in b."""
    known = {module.name for module in modules}

    def find(name: str) -> str | None:
        outer = name.rpartition(".")[0]
        return next((n for n in (name, f"{name}.__init__", outer, f"{outer}.__init__") if n in known), None)

    return {each.name: {find(name) for name in each.imports} - {None, each.name} for each in modules}


def find_circles(links: dict[str, set[str]]) -> list[tuple[str, ...]]:
    """Return the groups of modules that import each other, directly or indirectly."""
    reach = {name: set(others) for name, others in links.items()}
    for middle, onward in reach.items():
        for others in reach.values():
            others |= onward if middle in others else set()
    together = {tuple(sorted(o for o in reach if o in reach[name] and name in reach[o])) for name in reach}
    return sorted(together - {()})


def count_upward(root: Path, links: dict[str, set[str]]) -> int:
    """Count the imports of a higher layer of setup.cfg."""
    parser = configparser.ConfigParser()
    parser.read(root / "setup.cfg")
    lines = parser["importlinter:contract:layers"]["layers"].splitlines()
    depth = {name: at for at, line in enumerate(lines) for name in re.findall(r"[\w.]+", line)}
    stands = {name: max((depth[o] for o in depth if f"{name}.".startswith(f"{o}.")), default=0) for name in links}
    return sum(0 < stands[other] < stands[name] for name, others in links.items() for other in others)


def describe(modules: list[Module], passed: dict[str, set[str]]) -> dict[str, object]:
    """Make a row of the table of rooms."""
    functions = [function for module in modules for function in module.functions]
    lengths = sorted(each.end_lineno - each.lineno + 1 - measure_docstring(each) for each in functions) or [0]
    lines = sum(m.lines for m in modules)
    docs = sum(measure_docstring(node) for m in modules for node in [m.nodes[0], *m.classes, *m.functions])
    types = {name for name in passed["types"] if name.rpartition(".")[0] in {m.name for m in modules}}
    return {
        "lines": lines,
        "files": len(modules),
        "classes": sum(len(m.classes) for m in modules),
        "functions": len(lengths),
        "median": lengths[len(lengths) // 2],
        "p90": lengths[int(len(lengths) * 0.9)],
        "docs": f"{docs / max(lines, 1):.0%}",
        "passed": len({m.path for m in modules} & passed["files"]),
        "types": len(types),
    }


def summarise(root: Path, modules: list[Module]) -> dict[str, str]:
    """Return the figures of the whole checkout."""
    homes = defaultdict[str, list[str]](list)
    for module in modules:
        for each in module.classes:
            homes[each.name].append(module.path)
    docstrings = [text for module in modules for text in module.list_docstrings()]
    inverted = sum(bool(INVERTED.match(text)) for text in docstrings)
    links = link(modules)
    circles, twice = find_circles(links), sorted(name for name, files in homes.items() if len(files) > 1)
    experts = [module.path for module in modules if "expert" in module.text.lower() and module.room != "extensions"]
    figures = {}
    for concept, names in CONCEPTS.items():
        known = [name for name in names.split() if {name, f"_{name}"} & homes.keys()]
        figures[f"types for {concept}"] = f"{len(known)}: {' '.join(known)}"
    figures |= {
        'files with "expert" outside extensions/': str(len(experts)),
        "class names used twice": " ".join(twice) or "none",
        "import circles": "; ".join(map(str, circles)) or "none",
        "imports that point up": str(count_upward(root, links)),
        "docstrings that begin with What, Who, Which, Of, The same": f"{inverted} of {len(docstrings)}",
        "lines of tests": str(count_lines(root / "tests")),
        "lines of bench": str(count_lines(root / "bench")),
        "words of documents": str(count_words(root)),
    }
    return figures


def count_lines(folder: Path) -> int:
    return sum(file.read_text().count("\n") for file in folder.rglob("*.py"))


def count_words(root: Path) -> int:
    """Count the words of the Markdown files at the root, in docs and in the examples."""
    files = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "examples").rglob("*.md")]
    return sum(len(file.read_text().split()) for file in files)


@contextmanager
def note_passed(root: Path, files: set[str], types: set[str]) -> Iterator[None]:
    """Record the package's files and types that run inside the context, on this thread and on new ones."""
    package = f"{root / PACKAGE}{os.sep}"

    def note(frame: object, event: str, _: object) -> None:
        code = frame.f_code
        ours = code.co_filename.startswith(package)
        if event != "call" or not code.co_flags & IN_FUNCTION or not (ours or code.co_filename.startswith("<")):
            return
        files.update([code.co_filename.removeprefix(package)] if ours else ())
        if code.co_argcount and code.co_varnames[0] in ("self", "cls", "_cls"):
            first = frame.f_locals.get(code.co_varnames[0])
            kind = first if isinstance(first, type) else type(first)
            types.update([f"{kind.__module__}.{kind.__name__}"] if kind.__module__.startswith(PACKAGE) else ())

    threading.setprofile(note)
    sys.setprofile(note)
    yield
    sys.setprofile(None)
    threading.setprofile(None)


def run_rank(root: Path, folder: Path) -> None:
    """Run one rank: train a step and save if there is no save yet, else load and count files and types."""
    import deepspeed
    import torch

    __import__(PACKAGE)
    saving = not (folder / "saved" / "latest").exists()
    model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.GELU(), torch.nn.Linear(40, 24))
    settings = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
    settings |= {"optimizer": {"type": "Adam", "params": {"torch_adam": True}}, "checkpoint": {"universal": not saving}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    if saving:
        engine.backward(engine(torch.ones(1, 24, dtype=torch.bfloat16)).float().sum())
        engine.step()
        engine.save_checkpoint(str(folder / "saved"))
        return
    files, types = set(), set()
    with note_passed(root, files, types):
        engine.load_checkpoint(str(folder / "saved"))
    (folder / f"passed-{engine.global_rank}.json").write_text(json.dumps({"files": [*files], "types": [*types]}))


def trace_resume(root: Path) -> dict[str, set[str]]:
    """Return the files and types of a resume, of all its ranks."""
    environment = {**os.environ, "PYTHONPATH": str(root), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        for world in (SAVED_BY, LOADED_BY):
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), __file__]
            command = [sys.executable, *launch, "--root", str(root), "--rank", folder]
            subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
        counted = [json.loads(file.read_text()) for file in Path(folder).glob("passed-*.json")]
    return {kind: set().union(*(each[kind] for each in counted)) for kind in ("files", "types")}


def main() -> None:
    """Print the figures of a checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="a checkout; without it, this one")
    parser.add_argument("--list", action="store_true", help="name the files and types that a resume passes")
    parser.add_argument("--no-resume", action="store_true", help="only figures of the source")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    root = asked.root.resolve()
    if asked.rank:
        return run_rank(root, asked.rank)
    passed = {"files": set(), "types": set()} if asked.no_resume else trace_resume(root)
    modules = [Module(root, file) for file in sorted((root / PACKAGE).rglob("*.py"))]
    for number, room in enumerate([*sorted({each.room for each in modules}), "all"]):
        row = describe([each for each in modules if room in (each.room, "all")], passed)
        if not number:
            print("room".ljust(16), *(title.rjust(5) for title in row))
        print(room.ljust(16), *(f"{cell:>{max(5, len(title))}}" for title, cell in row.items()))
    print(*(f"{name}: {figure}" for name, figure in summarise(root, modules).items()), sep="\n")
    print(*(f"  {name}" for name in sorted(passed["files"] | passed["types"]) if asked.list), sep="\n")
    return None


if __name__ == "__main__":
    main()
