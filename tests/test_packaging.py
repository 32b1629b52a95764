"""What an installed qvit promises before any model is touched: light imports, complete metadata, a clean tree."""

from __future__ import annotations

import configparser
import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import qvit

ROOT = Path(__file__).resolve().parents[1]

IMPORT_PROBE = """
import json, sys, torch
before = set(sys.modules)
import qvit
added = sorted(set(sys.modules) - before)
print(json.dumps({"added": added, "modules": sorted(sys.modules), "cuda": torch.cuda.is_initialized()}))
"""


def tracked_files() -> list[Path]:
    """Every file that git tracks; skips the test where the sources are no git checkout."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def probe_import(body: str = IMPORT_PROBE) -> dict:
    result = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    return json.loads(result.stdout)


def test_import_loads_only_torch():
    seen = probe_import()
    assert seen["added"] == ["qvit"]
    for heavy in ("timm", "triton", "torchvision", "datasets", "sklearn", "PIL", "yaml"):
        assert heavy not in seen["modules"], f"importing qvit loads {heavy}"
    assert not seen["cuda"]


def test_import_probe_sees_a_heavy_import():
    seen = probe_import(IMPORT_PROBE.replace("import qvit", "import qvit, timm"))
    assert "timm" in seen["added"]


@pytest.mark.parametrize("name", qvit.__all__)
def test_public_name_resolves(name):
    assert getattr(qvit, name) is not None
    assert name in dir(qvit)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        qvit.no_such_name  # noqa: B018


def test_version_equals_metadata():
    assert importlib.metadata.version("qvit") == qvit.__version__
    assert f"## {qvit.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_packages_in_setup_cfg_are_complete():
    declared = set(setup_cfg()["options"]["packages"].split())
    found = {str(p.parent.relative_to(ROOT)).replace("/", ".") for p in (ROOT / "qvit").rglob("__init__.py")}
    assert declared == found | {"qvit.patches"}
    assert (ROOT / "patches" / "__init__.py").is_file()


def test_every_module_lies_in_a_declared_package():
    declared = {name.replace(".", "/") for name in setup_cfg()["options"]["packages"].split()}
    for path in (ROOT / "qvit").rglob("*.py"):
        assert str(path.parent.relative_to(ROOT)) in declared, f"{path} would not be installed"


def test_third_party_imports_are_declared():
    options = setup_cfg()
    text = options["options"]["install_requires"] + "".join(v for _, v in options.items("options.extras_require"))
    declared = {re.split(r"[><=\s]", line)[0] for line in text.split("\n") if line.strip()}
    names = {"nvidia-ml-py": "pynvml", "pillow": "PIL", "pyyaml": "yaml", "scikit-learn": "sklearn"}
    allowed = {names.get(d, d) for d in declared} | set(sys.stdlib_module_names) | {"qvit", "torch", "triton"}
    allowed |= {"torchvision"}  # a dependency of timm
    for folder in ("qvit", "patches", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            for match in re.finditer(r"^\s*(?:import|from)\s+([A-Za-z_]\w*)", path.read_text(encoding="utf-8"), re.M):
                assert match[1] in allowed, f"{path.relative_to(ROOT)} imports {match[1]}, which setup.cfg lacks"


def test_the_floors_that_ci_installs_are_those_of_setup_cfg():
    required = setup_cfg()["options"]["install_requires"].split()
    pinned = [x for x in (ROOT / "tests" / "floors.txt").read_text(encoding="utf-8").splitlines() if x[0] != "#"]
    assert pinned == [x.replace(">=", "==") for x in required if ">=" in x]


def test_readme_code_compiles():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    assert blocks, "the README shows no Python"
    for block in blocks:
        compile(block, "README.md", "exec")
        for name in re.findall(r"\bqvit\.(\w+)", block):
            assert name in qvit.__all__, f"the README uses qvit.{name}"


def test_readme_names_files_that_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert links
    for link in links:
        assert (ROOT / link).exists(), f"README.md links to {link}"


def test_no_machine_paths_in_the_tree():
    pattern = re.compile(r"(?<![\w.])/(?:root|home|work|Users)/\w")
    for path in tracked_files():
        if path.suffix not in {".safetensors", ".png"} and path.name != Path(__file__).name:
            found = pattern.search(path.read_text(encoding="utf-8"))
            assert not found, f"{path.relative_to(ROOT)} names a path of one machine: {found[0]}"


def test_no_large_or_foreign_files_in_the_tree():
    limit = 1 << 20
    forbidden = {".parquet", ".arrow", ".pt", ".pth", ".bin", ".jpg", ".jpeg", ".so", ".cubin", ".pyc"}
    for path in tracked_files():
        assert path.suffix.lower() not in forbidden, f"{path.relative_to(ROOT)} does not belong in the repository"
        assert path.stat().st_size < limit, f"{path.relative_to(ROOT)} is larger than 1 MiB"


def test_every_weight_file_is_a_demo_model():
    weights = {p.name for p in (ROOT / "configs" / "weights").iterdir()}
    assert weights == {"demo_deit.safetensors", "demo_swin.safetensors"}


def test_no_submodule_has_the_name_of_something_public():
    """Importing it would put the module where the function was."""
    import pkgutil

    assert not {module.name for module in pkgutil.iter_modules(qvit.__path__)} & set(qvit.__all__)
