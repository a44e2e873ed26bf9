"""What the metadata of a package hold beyond pyproject.toml: the readme without relative links, and the project's URLs.

Both depend on where the project is published. PLURIBUS_URL says it: `https://github.com/OWNER/pluribus`, for example.
The release workflow sets it. Without it the metadata have no URLs, and the readme has neither links nor pictures.
"""

import os
import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!\w+:)(?P<path>[^)\s]+)\)")
PAGES = {"Documentation": "docs/quickstart.md", "Changelog": "CHANGELOG.md", "Contributing": "CONTRIBUTING.md"}


def resolve_links(readme: str, url: str | None, version: str) -> str:
    """The readme with absolute links to this version, or with their texts alone if no URL is known."""

    def resolve(link: re.Match[str]) -> str:
        if url is None:
            return "" if link["picture"] else link["text"]
        return f"{link['picture']}[{link['text']}]({locate(url, version, link['path'], bool(link['picture']))})"

    return LINK.sub(resolve, readme)


def locate(url: str, version: str, path: str, picture: bool = False) -> str:
    """The URL of a file of this version."""
    return f"{url}/{'raw' if picture else 'blob'}/v{version}/{path}"


def list_urls(url: str | None, version: str) -> dict[str, str]:
    """The project's URLs by their names on PyPI."""
    if url is None:
        return {}
    pages = {name: locate(url, version, path) for name, path in PAGES.items()}
    return {"Source": url, "Issues": f"{url}/issues", **pages}


if __name__ == "__main__":
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    url = os.environ.get("PLURIBUS_URL", "").rstrip("/") or None
    setup(
        long_description=resolve_links((ROOT / "README.md").read_text("utf-8"), url, version),
        long_description_content_type="text/markdown",
        project_urls=list_urls(url, version),
    )
