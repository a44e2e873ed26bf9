"""The documentation is true: what it shows runs, its tables are the code's, its links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

import pluribus
from pluribus.cli import USAGE
from pluribus.cli.flags import begin, parse_experiment
from pluribus.data.partitions import PARTITIONS
from pluribus.method import methods
from pluribus.models import zoo
from pluribus.study.reproduce import paper, summary

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "docs" / "pictures")]

import execute  # noqa: E402
import generate  # noqa: E402
import method_page  # noqa: E402
import methods as pictures  # noqa: E402
import scoreboard  # noqa: E402

PAGES = execute.PAGES
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]
EXECUTED = [path for path in PAGES if execute.FENCE.search(path.read_text(encoding="utf-8"))]
GENERATED = [
    (path, found["name"]) for path in PAGES for found in generate.SECTION.finditer(path.read_text(encoding="utf-8"))
]
every_page = pytest.mark.parametrize("page", PAGES, ids=NAMES)


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", read(page), flags=re.DOTALL | re.MULTILINE)


# ---- what is shown runs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", EXECUTED, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_shows_runs_and_prints_what_it_says(page):
    with execute.reader():
        for shown in execute.run_page(read(page), rounds=2):
            assert execute.agrees(shown.page_says, shown.really), (
                f"{page.name} shows\n{shown.page_says}\nbut what is printed is\n{shown.really}\n"
                "python docs/execute.py writes it anew"
            )


@pytest.mark.parametrize(
    ("says", "really", "same"),
    [
        ("mean   0.713\n", " mean  0.72 \n\n", True),
        ("mean 0.713\n", "worst 0.713\n", False),
        ("a 1\n...\nd 4\n", "a 5\nb\nc\nd 6\n", True),
        ("a 1\n...\nd 4\n", "a 5\nb\nc\n", False),
        ("a 1\n", "a 1\nb 2\n", False),
        ("a.b\n", "acb\n", False),
    ],
)
def test_outputs_are_compared_but_for_numbers(says, really, same):
    assert execute.agrees(says, really) is same


def test_a_command_that_ends_otherwise_than_the_page_says_is_noticed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="ended with status 2"):
        list(execute.run_page("```bash run\npluribus run nonsense\n```\n"))
    with pytest.raises(AssertionError, match="ended with status 0"):
        list(execute.run_page("```bash fails\npluribus --version\n```\n"))
    with pytest.raises(ZeroDivisionError):
        list(execute.run_page("```python run\n1 / 0\n```\n"))


def test_a_page_leaves_nothing_behind():
    kinds = ("model", "data", "partition")
    register = "\n".join(f"pluribus.register_{kind}('mine', 'of a page')(print)" for kind in kinds)
    before = Path.cwd(), sys.path[:], zoo.entries(), dict(PARTITIONS), pluribus.list_data(), sys.modules["__main__"]
    with execute.reader():
        list(execute.run_page(f"```python run\nimport pluribus\n{register}\n```\n"))
        assert "mine" in zoo.entries()
        assert "mine" in PARTITIONS
    after = Path.cwd(), sys.path, zoo.entries(), dict(PARTITIONS), pluribus.list_data(), sys.modules["__main__"]
    assert after == before


def test_a_class_of_a_page_is_found_as_that_of_a_script():
    method = "class Mine(pluribus.Method):\n    pass\n"
    run = "print(pluribus.run(Mine, clients=2, rounds=1, progress=False).method)\n"
    page = f"```python run\nimport pluribus\n{method}```\n```python run\n{run}```\n```text output\n```\n"
    with execute.reader():
        assert [shown.really for shown in execute.run_page(page)] == ["__main__.Mine\n"]


def test_no_block_is_marked_in_a_way_that_nobody_runs():
    for page in PAGES:
        for info in re.findall(r"^```([^\n`]+)$", read(page), re.MULTILINE):
            known = info in ("bash", "text", "toml", "python", "json") or re.fullmatch(
                "bash run|bash fails|python run|text output|python from .*", info
            )
            assert known, f"{page.name}: unknown kind of block: {info}"


@every_page
def test_code_that_is_quoted_from_a_file_stands_in_it(page):
    quotes = re.findall(r"^```python from (\S+)\n(.*?)^```$", read(page), re.DOTALL | re.MULTILINE)
    for file, code in quotes:
        assert code in read(ROOT / file), f"{file} no longer has\n{code}"


def test_the_page_about_methods_quotes_the_whole_example():
    quotes = re.findall(
        r"^```python from \S+\n(.*?)^```$", read(ROOT / "docs/add-a-method.md"), re.DOTALL | re.MULTILINE
    )
    whole = read(ROOT / "examples/my_method.py")
    assert "\n".join(quotes) == whole[whole.index("@dataclass") :]


# ---- what is said agrees with the code -------------------------------------------------------------------------------


def test_the_page_of_the_command_line_begins_with_the_overview_of_help() -> None:
    overview = [line.strip() for line in USAGE.splitlines() if line.startswith("  pluribus")]
    shown = re.search(r"```text\n(.*?)```", read(ROOT / "docs/cli.md"), re.DOTALL)[1].splitlines()
    assert [line for line in overview if not any(line.startswith(one) for one in shown if one)] == []


@pytest.mark.parametrize(("page", "name"), GENERATED, ids=[f"{page.name}: {name}" for page, name in GENERATED])
def test_a_generated_table_is_what_the_code_says(page, name):
    section = next(found for found in generate.SECTION.finditer(read(page)) if found["name"] == name)
    assert section[0] == f"{section[1]}{generate.SECTIONS[name]()}\n{section[3]}", (
        "python docs/generate.py refreshes it"
    )


def test_every_table_is_shown_somewhere():
    assert {name for _, name in GENERATED} == set(generate.SECTIONS)


def test_the_scoreboard_counts_what_its_tables_show():
    """Against the tables as they are printed: stars, rows, and the verdicts of the test."""
    rows = scoreboard.reproduced_rows()
    for (link, beside), row in zip(scoreboard._tables(ROOT / "docs/reproduction.md"), rows, strict=False):
        figures, differences = beside.to_markdown().split("\n\n")[:2]
        cells = dict(zip(scoreboard.COLUMNS, row, strict=True))
        assert cells["table"] == link
        assert cells["differ"] in (str(figures.count("\\*")), "-")
        assert int(cells["rows x seeds"].split()[0]) == figures.count("\n| ") - 1
        if beside.table.own in ("", beside.table.baseline) and beside.differences:
            ends = [line.rsplit("|", 2)[1].strip() for line in differences.splitlines()[2:]]
            tested = len(ends) - sum(word in ("not kept", "different views") for word in ends)
            assert f"shown against {ends.count('worse')} of {tested}" in cells[scoreboard.SHOWN]
            assert cells[scoreboard.SHOWN].count("the opposite") == min(ends.count("better"), 1)
    assert {row[4] for row in rows} >= {"0", "1", "-"}  # all cases are there


def test_every_method_has_a_page_with_all_its_parts():
    for name in methods():
        headings = " ".join(re.findall(r"^## (.*)$", read(ROOT / f"docs/methods/{name}.md"), re.MULTILINE))
        assert re.fullmatch(r"Symbols Algorithm.* Deviations Command What travels", headings), name


def test_the_picture_of_every_method_is_of_the_command_beside_it():
    by_method = {name: case for case in pictures.CASES for name in case.methods}
    found = pictures.known()
    assert sorted(name for case in pictures.CASES for name in case.methods) == sorted(methods()) == sorted(found)
    for name, one in found.items():
        assert one["command"] == by_method[name].command(name)
        assert set(one["lines"]) == {name, by_method[name].baseline}
        assert {len(values) for line in one["lines"].values() for _, values in line} == {pictures.SEEDS}


@pytest.mark.parametrize("name", ["fedgh", "fedh2l", "hetlora"])
def test_a_picture_shows_the_numbers_that_were_run(name):
    assert read(pictures.PICTURES / f"{name}.svg") == pictures.draw(pictures.known()[name])


def test_the_address_of_a_paper_on_a_page_is_the_one_at_its_top():
    """Pages name addresses in their text, too."""
    for name in methods():
        top, text = method_page.facts(name), read(ROOT / f"docs/methods/{name}.md").partition("\n## ")[0]
        for address in re.findall(r"\]\((https://(?:arxiv|doi)\.org/[^)]+)\)", text):
            assert f"({address})" in top, name


def test_the_readme_names_every_method_beside_its_family():
    rows = re.findall(r"^\| ([\w -]+) \| [^|]+ \| (\[`.*) \|$", read(ROOT / "README.md"), re.MULTILINE)
    linked = [
        (name, family) for family, row in rows for name in re.findall(r"\[`([\w-]+)`\]\(docs/methods/\1\.md\)", row)
    ]
    assert sorted(linked) == [(name, cls.family) for name, cls in sorted(methods().items())]


def test_the_front_page_of_the_site_says_what_the_readme_says():
    readme, front = read(ROOT / "README.md"), read(ROOT / "docs/index.md")
    first = (
        readme[: readme.index("## On the command line")].replace("](docs/", "](").replace("```python run", "```python")
    )
    assert front.startswith(first.replace("generated: families in the readme", "generated: families"))


@pytest.mark.parametrize(
    "section", read(ROOT / "docs/papers.md").split("\n## ")[1:], ids=lambda text: text.split(",")[0]
)
def test_every_row_of_the_papers_can_be_run(section):
    """With the settings that a table shares, but for data that is not in the package."""
    shared = shlex.split(re.search(r"`(--data .*?)`", section, re.DOTALL)[1].replace("\n", " "))
    rows = re.findall(r"^\| [^`|]+ \| `pluribus run (.*?)` \|$", section, re.MULTILINE)
    assert len(rows) == section.count("\n| ") - 2  # but for the heading and the rule
    for row in rows:
        described, args = begin([*shlex.split(row)[:1], *shared, *shlex.split(row)[1:]])
        parsed, _ = parse_experiment("run", described, args, [])
        assert parsed.build_method() is not None
        assert parsed.method in methods()


@pytest.mark.parametrize(
    ("paper_name", "table", "own"),
    [
        ("FedGH", "fedgh-table1-cifar10", "--models fedgh-cnn1"),
        ("FedGH", "fedgh-table3-cifar10", "--models fedgh"),
        ("FedFree", "fedfree-table1-cifar10-n10-homogeneous", "--models fedfree-cnn --image-size 32"),
        ("FedH2L", "fedh2l-table2", ""),
    ],
)
def test_the_commands_of_a_paper_run_its_table(paper_name, table, own):
    """The page of commands and the files of tables agree on every setting that decides a figure."""
    (section,) = [text for text in read(ROOT / "docs/papers.md").split("\n## ") if text.startswith(f"{paper_name}, ")]
    shared = shlex.split(re.search(r"`(--data .*?)`", section, re.DOTALL)[1].replace("\n", " "))
    commands = dict(re.findall(r"^\| ([^`|]+) \| `pluribus run (.*?)` \|$", section, re.MULTILINE))
    found = paper.find(table)
    rows = [row for row in found.rows if row.label in commands]
    assert len(rows) >= 5
    for row in rows:
        method, *flags = shlex.split(commands[row.label])
        described, args = begin([method, *shared, *shlex.split(own), *flags])
        parsed, _ = parse_experiment("run", described, args, [])
        assert summary.decisive(parsed) == summary.decisive(found.experiment(row)), row.label


def test_partition_tables_are_what_a_run_holds(tmp_path):
    pluribus.run("local", clients=4, rounds=1, progress=False, out=str(tmp_path / "run"))
    counts = json.loads((tmp_path / "run" / "partition.json").read_text())["counts"]
    table = generate.SECTIONS["counts dirichlet"]().splitlines()[2:]
    assert [[int(cell) for cell in row.strip("| ").split("|")][1:-1] for row in table] == counts


def test_the_keys_of_the_json_are_explained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert execute.pluribus(["run", "local", "--clients", "2", "--rounds", "1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    table = re.search(r"<!-- keys -->\n\n(.*?)\n\n", read(ROOT / "docs/cli.md"), re.DOTALL)[1]
    explained = [key for row in table.splitlines()[2:] for key in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert explained == list(printed)


def test_what_bench_prints_is_shown_and_its_keys_are_explained(capsys):
    report = pluribus.bench("fedgh", clients=4, rounds=1, progress=False)
    page = read(ROOT / "docs/cli.md")
    shown = re.search(r"<!-- bench -->\n\n```text\n(.*?)```", page, re.DOTALL)[1]
    report.table()
    assert labels(shown) == labels(capsys.readouterr().out) != []
    table = re.search(r"<!-- bench keys -->\n\n(.*?)\n\n", page, re.DOTALL)[1]
    rows = [row.split("|")[1:3] for row in table.splitlines()[2:]]
    told = report.to_json()
    assert [key for keys, _ in rows for key in re.findall(r"`(\w+)`", keys)] == list(told)
    parts = {keys.strip(" `"): re.findall(r"`(\w+)`", meaning) for keys, meaning in rows}
    for key in ("shares", "memory", "bytes"):
        assert parts[key] == list(told[key])
    assert parts["each"] == list(told["each"][0])


def test_the_keys_of_a_data_check_are_explained():
    table = re.search(r"<!-- data check keys -->\n\n(.*?)\n\n", read(ROOT / "docs/cli.md"), re.DOTALL)[1]
    explained = [key for row in table.splitlines()[2:] for key in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert explained == list(pluribus.check_data("digits").to_json())


def labels(table: str) -> list[str]:
    """What stands before a number and some space."""
    return re.findall(r"^ ([A-Za-z ]+?) {2,}\d", table, re.MULTILINE)


def test_the_files_of_a_run_folder_are_explained(tmp_path):
    pluribus.run("fedgh", clients=2, rounds=1, progress=False, out=str(tmp_path / "run"))
    there = {path.name for path in (tmp_path / "run").iterdir() if not path.name.startswith(".")}
    for page in ("quickstart", "resume"):
        explained = set(re.findall(r"^\| `([\w.]+)[/`]", read(ROOT / f"docs/{page}.md"), re.MULTILINE))
        assert explained >= there


def test_the_layout_names_every_module_and_no_other():
    layout = re.search(r"^src/pluribus/\n(.*?)^tests/", read(ROOT / "CONTRIBUTING.md"), re.DOTALL | re.MULTILINE)[1]
    folders, named = [""], set()
    for indent, name in re.findall(r"^((?:  ){1,3})([\w.]+(?:\.py|/))(?: |$)", layout, re.MULTILINE):
        depth = len(indent) // 2
        folders[depth:] = [f"{folders[depth - 1]}{name}"]
        named.add(folders[depth])
    source = ROOT / "src" / "pluribus"
    modules = {str(path.relative_to(source)) for path in source.rglob("*.py")}
    packages = {f"{Path(module).parent}/" for module in modules if module.endswith("/__init__.py")}
    papers = {module for module in modules if module.startswith("methods/")}
    assert named == {m for m in modules - papers if not m.endswith("/__init__.py")} | packages


# ---- pages -----------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """What headings of a page are called in links."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return set(map(scoreboard.anchor, headings))


@every_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(file), (
            f"{page.name} links to {target}, which has {sorted(anchors(file))}"
        )


@every_page
def test_headings_and_cells_show_no_markup(page):
    """Headings are lines of the contents, which has no formulas. Not every Markdown knows a backslash before <."""
    lines = prose(page).splitlines()
    assert [line for line in lines if re.match("#+ ", line) and re.search(r"[$\\]", line)] == []
    assert [line for line in lines if line.startswith("|") and re.search(r"\\[<>]", line)] == []


@every_page
def test_a_page_has_one_title(page):
    assert len(re.findall(r"^# ", prose(page), re.MULTILINE)) == 1


def test_the_contents_lead_to_every_page():
    index = ROOT / "docs" / "index.md"
    linked = {
        (index.parent / target.partition("#")[0]).resolve() for target in re.findall(r"\]\(([^)]+)\)", read(index))
    }
    assert {page for page in PAGES if page.is_relative_to(ROOT / "docs")} - {index} <= linked


def test_the_changelog_has_this_version():
    assert f"## {pluribus.__version__}" in read(ROOT / "CHANGELOG.md")
