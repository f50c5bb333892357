"""Draws docs/figures/app.png: the page of `rtp-ext plan --app` in headless Chromium.

    python benchmarks/planner/app_figure.py [FILE] [--width N] [--height N] [--dark]

It needs Dash, selenium, and Debian's packages chromium and chromium-driver.
"""

import argparse
import base64
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from selenium import webdriver

FILE = Path(__file__).resolve().parents[2] / "docs" / "figures" / "app.png"


def draw(address: str, file: Path, width: int, height: int, dark: bool) -> None:
    """Writes a picture of the top of the page. height: 0: the whole page. Raises RuntimeError where it stays empty."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(flag)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        screen = {"width": width, "height": height or 1000, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        browser.get(address)
        end = time.monotonic() + 30
        while not browser.find_elements("css selector", "#search table"):
            if time.monotonic() > end:
                raise RuntimeError("the page shows no plans after 30 s")
            time.sleep(0.1)
        if not height:
            screen["height"] = browser.execute_script("return document.documentElement.scrollHeight")
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        time.sleep(0.5)  # fonts and transitions
        picture = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})
        file.write_bytes(base64.b64decode(picture["data"]))
    finally:
        browser.quit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=FILE)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=960, help="0: the whole page")
    parser.add_argument("--dark", action="store_true")
    given = parser.parse_args()
    command = [sys.executable, "-m", "rtp_ext", "plan", "--app", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            draw(
                re.findall(r"http://\S+", server.stdout.readline())[0],
                given.file,
                given.width,
                given.height,
                given.dark,
            )
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
