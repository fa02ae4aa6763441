"""Type what the pages print: every command and Python block of README and the first pages, in an empty folder.

    python tools/first_steps.py [--make] [PAGE ...]

The folder has what a reader would have there: the project's environment as ``.venv``, its examples, and, for the page
on own data, a graph, a network and a method. ``make`` commands are run with ``--make`` only, in a copy of the project.
Prints every command with its time; the exit code tells whether all of them ended well.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "docs/choosing.md", "docs/own-data.md", "docs/tutorial.ipynb")
SETTING = """
import torch
torch.manual_seed(0)
y = torch.randint(0, 3, (300,))
x = torch.randn(300, 8) + y[:, None]
edge_index = torch.randint(0, 300, (2, 1200))
owner = torch.randint(0, 3, (300,))
from torch_geometric.data import Data
data = Data(x=x, edge_index=edge_index, y=y)
graph = data
"""
"""What Python blocks call `x`, `data` and so on: the reader's own."""
NETWORK = """
import torch
from torch_geometric.nn import SAGEConv


class Net(torch.nn.Module):
    def __init__(self, num_features, num_classes):
        super().__init__()
        self.first, self.second = SAGEConv(num_features, 16), SAGEConv(16, num_classes)

    def forward(self, x, edge_index):
        return self.second(self.first(x, edge_index).relu(), edge_index)
"""


def steps(page: Path) -> list[str]:
    """Commands of a page (lines that begin with ``$``) and its Python blocks, in order."""
    found = []
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        if kind == "python" and "..." not in block and "class " not in block:
            found.append(f"python\n{block}")
        else:
            found += [re.sub(r"\s+#.*", "", line[2:]) for line in block.splitlines() if line.startswith("$ ")]
    return found


def prepare(folder: Path) -> None:
    (folder / ".venv").symlink_to(sys.prefix)
    shutil.copytree(ROOT / "examples", folder / "examples")
    shutil.copy(ROOT / "examples" / "fedmedian.py", folder / "my_method.py")
    (folder / "net.py").write_text(NETWORK)
    (folder / "save.py").write_text(SETTING + 'torch.save(data, "graph.pt")\n')
    subprocess.run([sys.executable, "save.py"], cwd=folder, check=True)


def run(step: str, folder: Path, make: bool) -> tuple[str, str]:
    """What became of a step (ok, failed, not run), and its output."""
    if step.startswith("python\n"):
        file = folder / "block.py"
        file.write_text(SETTING + step.removeprefix("python\n"))
        command, place = [sys.executable, str(file)], folder
    elif step.startswith("make"):
        if not make:
            return "not run (--make)", ""
        command, place = step.split(), ROOT
    elif step.endswith(".ipynb"):
        script = (
            f"import nbformat, nbclient; book = nbformat.read({str(ROOT / step)!r}, as_version=4); "
            "nbclient.NotebookClient(book, timeout=600).execute()"
        )
        command, place = [sys.executable, "-c", script], folder
    else:
        command, place = ["bash", "-c", step], folder
    done = subprocess.run(command, cwd=place, capture_output=True, text=True)
    return "ok" if done.returncode == 0 else f"failed ({done.returncode})", done.stdout + done.stderr


def main(arguments: list[str]) -> int:
    make = "--make" in arguments
    pages = [page for page in arguments if page != "--make"] or list(PAGES)
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        for page in pages:
            for step in [page] if page.endswith(".ipynb") else steps(ROOT / page):
                begun = time.monotonic()
                status, output = run(step, folder, make)
                failed += status.startswith("failed")
                shown = step.replace("python\n", "python: ").splitlines()[0][:110]
                sys.stdout.write(f"{page}: {shown}: {status}, {time.monotonic() - begun:.0f} s\n")
                sys.stdout.write(
                    "".join(f"    {line}\n" for line in output.splitlines()[-12:]) if "failed" in status else ""
                )
                sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
