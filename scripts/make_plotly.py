"""Makes the plotly.js that reports include: only the plots that they draw, minified, with its licenses beside it.

    python scripts/make_plotly.py [FOLDER]

It needs npm, and a registry. FOLDER is where plotly.min.js and plotly.LICENSES.txt go; without it, the folder of the
package. Scatter is part of plotly.js's core; bar and heatmap are added. Every package has the version that was the
newest on DATE, so that a second run writes the same files.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PLOTLY, ESBUILD = "4.1.1", "0.28.2"
DATE = "2026-11-18"
TRACES = ("bar", "heatmap")
BANNER = (
    f"/* plotly.js {PLOTLY} with {' and '.join(TRACES)}. Copyright Plotly Technologies Inc. and the authors of the "
    "packages that it includes. License: MIT; see plotly.LICENSES.txt of Pluribus. */"
)
FLAGS = (
    "--bundle",
    "--minify",
    "--format=iife",
    "--global-name=Plotly",
    "--target=es2020",
    "--define:global=window",
    "--define:define.amd=false",
    "--loader:.css=empty",  # the style of maps, which are left out
    "--legal-comments=none",  # the licenses are written to a file
    f"--banner:js={BANNER}",
)


def build(folder: Path) -> tuple[str, str]:
    """The script, and the licenses of all packages in it. `folder` is where they are downloaded and bundled."""
    packages = f"plotly.js@{PLOTLY}", f"esbuild@{ESBUILD}"
    _call(folder, "npm", "install", *packages, f"--before={DATE}", "--ignore-scripts", "--no-audit", "--no-fund")
    traces = ", ".join(f'require("plotly.js/lib/{name}")' for name in TRACES)
    lines = (
        'const Plotly = require("plotly.js/lib/core");',
        f"Plotly.register([{traces}]);",
        "module.exports = Plotly;",
    )
    (folder / "entry.js").write_text("\n".join(lines))
    out, facts = folder / "plotly.min.js", folder / "facts.json"
    _call(folder, "node_modules/.bin/esbuild", "entry.js", *FLAGS, f"--outfile={out}", f"--metafile={facts}")
    script = out.read_text(encoding="utf-8")
    if "</script" in script:
        raise SystemExit("the bundle would close the element of a page that includes it.")
    return script, "\n\n".join(_license(folder, name) for name in _packages(json.loads(facts.read_text())))


def _packages(facts: dict[str, dict[str, dict[str, dict[str, dict[str, int]]]]]) -> list[str]:
    """Packages that have at least one byte in the bundle, plotly.js first."""
    (output,) = facts["outputs"].values()
    files = [file for file, one in output["inputs"].items() if one["bytesInOutput"] and file.endswith("js")]
    names = {name[1] for file in files if (name := re.match(r"node_modules/((?:@[^/]+/)?[^/]+)", file))}
    return sorted(names, key=lambda name: (name != "plotly.js", name))


def _license(folder: Path, name: str) -> str:
    package = folder / "node_modules" / name
    about = json.loads((package / "package.json").read_text(encoding="utf-8"))
    kind = about.get("license") or " or ".join(one["type"] for one in about["licenses"])
    texts = [file for file in sorted(package.iterdir()) if re.match("licen[sc]e", file.name, re.IGNORECASE)]
    author = about.get("author", "")
    by = author if isinstance(author, str) else author.get("name", "")
    text = (
        texts[0].read_text(encoding="utf-8").strip() if texts else f"By {by or 'its authors'}, without a license text."
    )
    return f"{'=' * 80}\n{name} {about['version']} ({kind})\n\n{text}\n"


def _call(folder: Path, *command: str) -> None:
    subprocess.run(command, cwd=folder, check=True)


def main(folder: Path) -> None:
    """Build in a temporary folder, then write both files."""
    with tempfile.TemporaryDirectory() as temporary:
        script, licenses = build(Path(temporary))
    for name, text in (("plotly.min.js", script), ("plotly.LICENSES.txt", licenses)):
        (folder / name).write_text(text, encoding="utf-8")
        print(f"wrote {folder / name}: {len(text):,} characters")


if __name__ == "__main__":
    package = Path(__file__).resolve().parent.parent / "src" / "pluribus" / "report"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else package)
