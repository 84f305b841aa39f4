"""The server's page, in a real browser, with the keyboard alone."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from specdec.runtime import LLM, SpeculativeConfig
from specdec.serve.app import PAGE
from support.bundles import shared_bundle
from support.served import Served, served

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def test_the_page_refers_to_nothing_outside() -> None:
    page = PAGE.read_text()
    assert re.findall(r'(?:href|src)="([^"]*)"', page) == ["data:,"]
    assert not re.search(r"https?:|//\w|@import|url\(|\bstyle=|\bon\w+=", page)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    speculative = SpeculativeConfig(method="model", num_speculative_tokens=3)
    with LLM(shared_bundle(), speculative=speculative, verify=False) as llm, served(llm) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: chromium is not installed")
@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 390)])
def test_a_chat_with_the_keyboard_alone(
    server: Served, browser: Browser, tmp_path: Path, scheme: str, width: int
) -> None:
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 800})  # type: ignore[arg-type]
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(server.url)
    expect(page.locator("#model")).to_have_text("tiny")
    page.keyboard.type("the quick brown fox")  # the message has the focus
    page.keyboard.press("Enter")
    answer = page.locator("article.assistant")
    for origin in ("accepted", "bonus"):
        shown = answer.locator(f"span.{origin}").filter(has_text=re.compile(r"\w"))  # not all have text
        expect(shown.first).to_be_visible(timeout=60000)
    figures = re.compile(r"^\d+ tokens · [\d.]+ tokens/s · τ [\d.]+$")
    expect(page.locator("#figures")).to_have_text(figures, timeout=60000)
    expect(page.locator("#send")).to_have_text("Send", timeout=60000)
    narrow = width < 736  # there the parameters stand above the conversation
    assert page.locator("#parameters").get_attribute("open") == (None if narrow else "")
    page.keyboard.press("Shift+Tab")  # to the API key, the last of the parameters, or to what opens them
    if narrow:
        page.keyboard.press("Enter")
        for _ in range(5):
            page.keyboard.press("Tab")
    page.keyboard.type("secret")
    assert page.locator("#key").input_value() == "secret"
    page.keyboard.press("Tab")
    page.keyboard.type("again")
    page.keyboard.press("Enter")
    expect(page.locator("article.user")).to_have_count(2)
    page.keyboard.press("Escape")
    expect(page.locator("#send")).to_have_text("Send", timeout=60000)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(19, 21, 25)"
    assert dark == (scheme == "dark")
    page.screenshot(path=tmp_path / "page.png")
    assert problems == []
    page.close()
