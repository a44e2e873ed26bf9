"""Take the picture of a report: its page on a desktop, and on a phone in dark mode.

python docs/pictures/report.py
"""

from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

import pluribus

CHROMIUM = "/usr/bin/chromium"
SETTINGS = {"clients": 8, "rounds": 20, "lr": 0.05}
HEIGHT, DESKTOP, PHONE = 1640, 920, 390  # pixels


def main() -> None:
    """Compare three methods, write the page about the runs, and put two pictures of it side by side."""
    with TemporaryDirectory() as folder:
        pluribus.compare(["local", "fedgh", "fedproto"], seeds=3, out=f"{folder}/runs", progress=False, **SETTINGS)
        address = pluribus.write_report(f"{folder}/runs", f"{folder}/page.html", embeddings="none")[0].as_uri()
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM)
            taken = [take(browser, address, DESKTOP, "light"), take(browser, address, PHONE, "dark")]
        picture = Image.new("RGB", (DESKTOP + PHONE, HEIGHT))
        for path, left in zip(taken, (0, DESKTOP), strict=True):
            with Image.open(path) as part:
                picture.paste(part, (left, 0))
        picture.quantize(128).save(Path(__file__).with_suffix(".png"), optimize=True)


def take(browser: Browser, address: str, width: int, scheme: str) -> Path:
    """A picture of the top of the page."""
    page = browser.new_page(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
    page.goto(address)
    page.wait_for_timeout(1000)
    path = Path(page.url.removeprefix("file://")).with_name(f"{width}.png")
    page.screenshot(path=path)
    return path


if __name__ == "__main__":
    main()
