"""The import rule, by importing every module in a fresh interpreter and by reading every import
statement.

splice            imports neither torch, Megatron, vLLM nor transformers; of ours the orchestrator,
                  the trainer's launcher and its registry of losses. splice.tinker, which needs an
                  extra, has numpy too
orchestrator      imports neither torch, Megatron, vLLM nor transformers, nor any other package of
                  ours
weight_transfer   imports torch; of ours only message types and errors
trainer_node      never vLLM;      inference_node  never Megatron;      of ours: weight_transfer,
                                                                        message types and errors

No two modules import each other, not even over a third one, within a function or for a type
checker. Nor do two folders. Helpers live apart from tests: no module imports a test module.
"""

from __future__ import annotations

import ast
import graphlib
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = ("splice", "orchestrator", "weight_transfer", "trainer_node", "inference_node", "benchmarks")
HEAVY = (
    "torch",
    "megatron",
    "vllm",
    "transformers",
    "peft",
    "cupy",
    "triton",
    "numpy",
    "safetensors",
)
SHARED_BY_ALL = ("orchestrator.protocol", "orchestrator.errors", "orchestrator.processes")

MAY_IMPORT_OF_OURS = {
    "splice": ("splice", "orchestrator", "trainer_node.launcher", "trainer_node.training.registry"),
    "orchestrator": ("orchestrator",),
    "weight_transfer": ("weight_transfer", *SHARED_BY_ALL),
    "trainer_node": ("trainer_node", "weight_transfer", *SHARED_BY_ALL),
    "inference_node": ("inference_node", "weight_transfer", *SHARED_BY_ALL),
}
ALLOWED = {"splice.tinker": ("numpy",)}
"""What a package with its own extra may import all the same."""
TINKER = ("tinker", "fastapi", "uvicorn")
EDGES = {
    "splice.tinker": TINKER,
    "splice.replica_router": ("aiohttp",),
    "splice.cluster.ray_launcher": ("ray",),
    "splice.report": ("matplotlib",),
    "splice.rl.verifiers": ("verifiers", "renderers", "aiohttp"),
}
"""Optional part -> the packages of its extra. Only the part imports them, and the core does not
import the part's packages."""
EXTRAS = {name for names in EDGES.values() for name in names} | {"reasoning_gym"}
NEVER = {
    "splice": HEAVY,
    "orchestrator": HEAVY,
    "weight_transfer": ("megatron", "vllm", "transformers", "peft"),
    "trainer_node": ("vllm",),
    "inference_node": ("megatron",),
}


def modules_of(package: str) -> list[str]:
    files = sorted((ROOT / package).rglob("*.py"))
    names = [
        ".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for f in files
    ]
    return [n for n in names if not n.endswith("__main__")]


def imported_names(source: str, *, module: str) -> set[str]:
    """Every module that the source names in an import statement, wherever it is; "typing only"
    counts as well.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import, which this test cannot read"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def is_within(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in packages)


def loaded_after_importing(modules: list[str]) -> set[str]:
    """Top names in `sys.modules` of a fresh interpreter after these imports."""
    script = (
        "import importlib, json, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted({n.partition('.')[0] for n in sys.modules} | {n for n in "
        "sys.modules if 'orchestrator' in n})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("package", list(NEVER))
def test_import_statements_point_one_way(package: str) -> None:
    wrong: dict[str, list[str]] = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for name in sorted(imported_names(path.read_text(encoding="utf-8"), module=module)):
            ours_but_not_allowed = is_within(name, OURS) and not _allowed(
                name, MAY_IMPORT_OF_OURS[package]
            )
            never = set(NEVER[package]) - set(ALLOWED.get(module.rpartition(".")[0], ()))
            if ours_but_not_allowed or is_within(name, tuple(never)):
                wrong.setdefault(module, []).append(name)
    assert not wrong


def imports_within(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module -> those of `sources` that its source imports. `from a import b` imports a.b if that
    is a module, else a.
    """

    def imported(node: ast.AST) -> set[str]:
        if isinstance(node, ast.Import):
            return {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            return full if full <= sources.keys() else {str(node.module)} | full
        return set()

    return {
        module: set().union(*map(imported, ast.walk(ast.parse(source)))) & sources.keys() - {module}
        for module, source in sources.items()
    }


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """`imports_within` of all packages."""
    modules = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
        for package in OURS
        for p in sorted((ROOT / package).rglob("*.py"))
    }
    return imports_within({m: path.read_text(encoding="utf-8") for m, path in modules.items()})


def test_no_import_circle(imports: dict[str, set[str]]) -> None:
    graphlib.TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


def folders_in_circles(imports: dict[str, set[str]]) -> set[str]:
    """Folders that import one another, also over a third one. A folder is not the one around it."""
    packages = {module.rpartition(".")[0] for module in imports} - {""}

    def folder(module: str) -> str:
        return module if module in packages else module.rpartition(".")[0]

    graph: dict[str, set[str]] = {folder(module): set() for module in imports}
    for module, imported in imports.items():
        graph[folder(module)] |= set(map(folder, imported)) - {folder(module)}

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        todo = graph[start]
        while todo:
            found |= todo
            todo = set().union(*(graph[name] for name in todo)) - found
        return found

    return {name for name in graph if name in reached(name)}


def test_no_circle_of_folders(imports: dict[str, set[str]]) -> None:
    assert not folders_in_circles(imports)


def test_a_circle_of_folders_is_found() -> None:
    sources = {"p": "", "p.main": "import p.a.x", "p.a": "", "p.a.x": "import p.b.y", "p.b": ""}
    way = imports_within(sources | {"p.b.y": "", "p.b.z": ""})
    assert not folders_in_circles(way)
    back = imports_within(sources | {"p.b.y": "", "p.b.z": "def f():\n    from p.a.x import g"})
    assert folders_in_circles(back) == {"p.a", "p.b"}
    up = imports_within(sources | {"p.b.y": "from p.main import f"})
    assert folders_in_circles(up) == {"p", "p.a", "p.b"}


@pytest.mark.parametrize(
    "late", ["def f():\n    from p import a", "if TYPE_CHECKING:\n    from p.a import X"]
)
def test_a_circle_is_found(late: str) -> None:
    graph = imports_within({"p": "", "p.a": "import p.b", "p.b": late, "p.c": "from p import a, b"})
    assert graph == {"p": set(), "p.a": {"p.b"}, "p.b": {"p.a"}, "p.c": {"p.a", "p.b"}}
    with pytest.raises(graphlib.CycleError, match=r"'p\.a'"):
        graphlib.TopologicalSorter(graph).prepare()


def _allowed(name: str, allowed: tuple[str, ...]) -> bool:
    # `from orchestrator import errors` names "orchestrator" too, which by itself is empty.
    return is_within(name, allowed) or (
        name == "orchestrator" and any(a.startswith("orchestrator.") for a in allowed)
    )


def test_orchestrator_loads_nothing_heavy() -> None:
    """Every module of it: the orchestrator runs where no torch is."""
    loaded = loaded_after_importing(modules_of("orchestrator"))
    assert not loaded & {*HEAVY, "splice", "weight_transfer", "trainer_node", "inference_node"}


def test_what_a_user_imports_and_types_loads_nothing_heavy() -> None:
    modules = [m for m in modules_of("splice") if not is_within(m, tuple(ALLOWED))]
    loaded = loaded_after_importing(modules)
    assert not loaded & {*HEAVY, "weight_transfer", "inference_node"}


def test_what_a_user_may_import_stays() -> None:
    """A name that goes breaks somebody's loop: it may only be added to this list."""
    import splice

    assert " ".join(splice.__all__) == (
        "ASK ASK_CHAT LOSS_PARAMETERS AdapterResult AsyncSpliceClient Batch BatchBuffers "
        "Completion ConfigError ContentChanged ErrorCode ExportHf ExportHfResult Forward "
        "ForwardBackward ForwardBackwardResult ForwardResult InitialSync JobFailed JobResult "
        "KlSpec LinkLost LoadAdapter LoadCheckpoint LoadCheckpointResult LossSpec MemoryUse "
        "NewAdapter NodeLost NodeStatus OptimParams OptimStep OptimStepResult Progress "
        "ProtocolError Publish PublishResult Resync SaveCheckpoint SaveCheckpointResult "
        "SpliceClient SpliceError Status TensorSpec TrainLora TrainLoraResult TrainMerged "
        "TrainMergedResult ValueSpec VerificationError batch_specs completions_of "
        "distillation_batch dpo_batch dpo_margins gae_batch group_advantages grpo_batch kl_of "
        "sft_batch"
    )
    assert all(getattr(splice, name).__doc__ for name in splice.__all__)


def test_users_import_splice_and_nothing_else_of_ours() -> None:
    """Examples, and the blocks of Python in every page."""
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    sources = [(p, p.read_text(encoding="utf-8")) for p in (ROOT / "examples").rglob("*.py")]
    sources += [
        (page, textwrap.dedent(block))
        for page in pages
        for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    ]
    wrong = {
        (str(path.relative_to(ROOT)), name)
        for path, source in sources
        for name in imported_names(source, module=str(path))
        if is_within(name, OURS) and not is_within(name, ("splice",))
    }
    assert len(sources) > 15
    assert not wrong


def test_the_core_loads_no_extra() -> None:
    needy = ("splice.tinker", "splice.replica_router")  # they import their extra at the top
    modules = [m for m in modules_of("splice") if not is_within(m, needy)]
    modules += [*modules_of("orchestrator"), "trainer_node", "inference_node"]
    assert not loaded_after_importing(modules) & EXTRAS


def test_only_its_part_imports_an_extra() -> None:
    wrong: dict[str, list[str]] = {}
    for package in NEVER:
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            own = {n for part, ns in EDGES.items() if is_within(module, (part,)) for n in ns}
            names = imported_names(path.read_text(encoding="utf-8"), module=module)
            if found := [n for n in names if is_within(n, tuple(EXTRAS - own))]:
                wrong[module] = found
    assert not wrong


def test_weight_transfer_loads_torch_and_message_types_only() -> None:
    # The Triton kernels are loaded on CUDA only; the rest is what a CPU host imports.
    modules = [m for m in modules_of("weight_transfer") if m != "weight_transfer.digest_kernels"]
    loaded = loaded_after_importing(modules)
    assert "torch" in loaded
    assert not loaded & {
        "megatron",
        "vllm",
        "transformers",
        "trainer_node",
        "inference_node",
        "cupy",
    }
    ours = {n for n in loaded if n.startswith("orchestrator.")}
    assert all(is_within(n, SHARED_BY_ALL) for n in ours), ours


@pytest.mark.parametrize(
    "package", ["splice", "trainer_node", "inference_node", "weight_transfer", "orchestrator"]
)
def test_importing_a_package_is_light(package: str) -> None:
    """vLLM's plug-in and torchrun's ranks import the package before they know what they need."""
    assert not loaded_after_importing([package]) & set(HEAVY)


def of_test_modules(names: set[str]) -> set[str]:
    """Those that are a test module's, or something in one."""
    return {
        n
        for n in names
        if is_within(n, ("tests",)) and any(part.startswith("test_") for part in n.split("."))
    }


def test_no_test_module_is_imported() -> None:
    """What several tests use has its own module next to them."""
    wrong: dict[str, set[str]] = {}
    for package in (*OURS, "tests", "examples"):
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            names = imported_names(path.read_text(encoding="utf-8"), module=module)
            if found := of_test_modules(names):
                wrong[module] = found
    assert not wrong


@pytest.mark.parametrize(
    "source",
    [
        "from tests.a.test_b import C",
        "from tests.a import test_b",
        "def f():\n    import tests.a.test_b as b",
    ],
)
def test_an_imported_test_module_is_found(source: str) -> None:
    assert "tests.a.test_b" in {
        n.removesuffix(".C") for n in of_test_modules(imported_names(source, module="x"))
    }
    likes = "from tests.a import tested, b_test_\nfrom a.test_b import C\nimport latest_b"
    assert not of_test_modules(imported_names(likes, module="x"))


def test_the_scan_sees_what_it_must(tmp_path: Path) -> None:
    """The scan itself: imports inside functions and under TYPE_CHECKING count, look-
    alikes do not.
    """
    source = "def f():\n    import vllm.config\nif TYPE_CHECKING:\n    from megatron import core\nimport vllm_like\n"  # noqa: E501
    names = imported_names(source, module="x")
    assert {n for n in names if is_within(n, ("vllm", "megatron"))} == {
        "vllm.config",
        "megatron",
        "megatron.core",
    }


def test_a_folder_of_that_name_does_not_hide_the_package(tmp_path: Path) -> None:
    """Such as the clone's own, next to which people put their scripts."""
    (tmp_path / "splice").mkdir()
    argv = [sys.executable, "-c", "from splice import LossSpec"]
    subprocess.run(argv, cwd=tmp_path, check=True, timeout=60)
