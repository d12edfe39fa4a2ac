"""The core imports none of the packages that are extras: a model of theirs is an nn.Module as any other."""

import ast
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "dosimeter"
EXTRAS = ("transformers", "peft", "timm", "rouge_score", "torchvision", "ray", "flwr", "nvflare", "duckdb", "pandas")
MAY_IMPORT = {"ray": ("runs", "terminal", "integrations"), "flwr": ("integrations",), "nvflare": ("integrations",)}
MAY_IMPORT |= {"duckdb": ("report", "terminal", "runs"), "pandas": ("report",)}


def imported(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_no_file_of_the_core_imports_an_extra():
    where = {
        (extra, str(file.relative_to(PACKAGE)))
        for file in PACKAGE.rglob("*.py")
        for extra in imported(file) & set(EXTRAS)
        if file.relative_to(PACKAGE).parts[0] not in MAY_IMPORT.get(extra, ())
    }
    assert not where


def test_reading_a_text_imports_no_extra():
    code = (
        "import sys, torch, dosimeter as dm\n"
        "from dosimeter.models.transformer import Transformer\n"
        "model = Transformer('gpt2', vocabulary=50, width=16, layers=1, heads=2, positions=8, classes=2).eval()\n"
        "exposure = dm.observe(model, dm.Batch(torch.tensor([[1, 2, 3]]), torch.tensor([1])))\n"
        "assert dm.recover_tokens(exposure).tokens == {1, 2, 3}\n"
        "print(*(name for name in sys.modules if '.' not in name))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & set(EXTRAS)
