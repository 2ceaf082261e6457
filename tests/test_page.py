"""The chat page in a headless Chromium, with a real model behind it."""

from __future__ import annotations

import json
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from test_server import KEY, Served, serving

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

EVIL = '<img src=x onerror="document.title=1"><script>document.title = 2</script> **bold** [x](javascript:alert(1))'


@pytest.fixture(scope="module")
def server(smollm2_path) -> Iterator[Served]:
    with serving(smollm2_path, "--cache-type", "tq4", "--alias", "small") as server:
        yield server


@pytest.fixture(scope="module")
def browser():
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("chromium and chromium-driver are not installed: the chat page is not tested")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1100,760"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))
    yield browser
    browser.quit()


@pytest.fixture
def page(browser, server) -> Page:
    browser.get(server.url)
    browser.execute_script("localStorage.clear(); sessionStorage.setItem('tq-ggml.key', arguments[0])", KEY)
    browser.get_log("browser")
    browser.refresh()
    page = Page(browser)
    page.settings(temperature=0, max_tokens=12)
    return page


class Page:
    def __init__(self, browser) -> None:
        self.browser = browser

    def find(self, selector: str):
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list:
        return self.browser.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        return [element.text for element in self.all(selector)]

    def press(self, label: str) -> None:
        next(b for b in self.all("button") if b.is_displayed() and b.text == label).click()

    def wait(self, until: Callable[[], object], what: str):
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if found := until():
                return found
            time.sleep(0.05)
        raise AssertionError(f"{what}: {self.find('body').text}")

    def settings(self, **values) -> None:
        self.press("Settings")
        for name, value in values.items():
            field = self.find(f"#s-{name}")
            field.clear()
            field.send_keys(str(value))
        self.press("Done")
        self.browser.execute_async_script("setTimeout(arguments[0], 20)")  # the close event comes after the click

    def type(self, text: str) -> None:
        self.find("#input").send_keys(text)

    def say(self, text: str) -> str:
        """Send a message and wait for the whole answer."""
        n = len(self.all("article.user"))
        self.type(text + Keys.ENTER)
        self.wait(lambda: len(self.all("article.user")) > n, "no message")
        self.wait(lambda: self.find("#send").text == "Send" and len(self.all("article.assistant")) > n, "no answer")
        return self.texts("article.assistant > div:first-child")[-1]


def test_a_conversation_and_its_meter(page, server):
    assert page.say("Say hello.")
    report = server.get("/v1/kv")
    page.wait(lambda: f"{report['tokens_used']} of 512 tokens" in page.find("#figures").text, "no figures")
    figures = page.find("#figures").text
    assert "cache tq4: " in figures and "of 3.2 MiB (f16: " in figures and "of 11.3)" in figures and "t/s" in figures
    assert page.find("#meter").get_attribute("class") == ""
    assert page.find("#model").text == "small"
    assert page.texts("#list li button:first-child")[0] == "Say hello."
    assert [entry for entry in page.browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_regenerate_edit_stop_and_keys(page):
    first = page.say("Say hello.")
    page.press("Regenerate")
    page.wait(lambda: page.texts("article.assistant > div:first-child") == [first], "another answer")
    page.wait(lambda: page.find("#send").text == "Send", "still running")
    page.press("Edit")
    assert page.find("#input").get_attribute("value") == "Say hello." and page.all("article") == []
    page.find("#input").clear()
    page.settings(max_tokens=400)
    page.type("Count from one to a thousand." + Keys.ENTER)
    page.wait(lambda: page.find("#send").text == "Stop" and page.texts("article.assistant")[-1:] > [""], "no answer")
    page.find("#input").send_keys(Keys.ESCAPE)
    page.wait(lambda: page.find("#send").text == "Send", "not stopped")
    page.find("#input").send_keys("two", Keys.SHIFT + Keys.ENTER, Keys.NULL, "lines")
    assert page.find("#input").get_attribute("value") == "two\nlines"


def test_conversations_are_kept_and_exported_and_imported(page, tmp_path):
    answer = page.say("Say hello.")
    page.browser.refresh()
    assert page.texts("article.assistant > div:first-child") == [answer]
    kept = page.browser.execute_script("return localStorage.getItem('tq-ggml.chats')")
    page.press("+ New chat")
    assert page.all("article") == [] and len(page.all("#list li")) == 2
    other = json.loads(kept)
    other["chats"][0] |= {"id": "another", "title": "Imported", "messages": [{"role": "user", "content": EVIL}, 7]}
    (tmp_path / "in.json").write_text(json.dumps(other))
    page.find("#file").send_keys(str(tmp_path / "in.json"))
    page.wait(lambda: "Imported" in page.texts("#list li button:first-child"), "not imported")
    (tmp_path / "bad.json").write_text("{")
    page.find("#file").send_keys(str(tmp_path / "bad.json"))
    page.wait(lambda: "cannot be imported" in page.texts("article.note")[-1], "no reason")


def test_markup_of_a_model_stays_text(page):
    code = "```\n<b>code</b>\n```\n- one\n- two\n\n| a | b |\n|---|---|\n| 1 | 2 |"
    script = "localStorage.setItem('tq-ggml.chats', JSON.stringify({chats: [{id: 'x', title: arguments[0], messages: ["
    script += (
        "{role: 'user', content: arguments[0]}, {role: 'assistant', content: arguments[0] + '\\n' + arguments[1]}]}]}))"
    )
    page.browser.execute_script(script, EVIL, code)
    page.browser.refresh()
    answer = page.find("article.assistant")
    assert "<img src=x" in answer.text and "<script>" in answer.text and "<b>code</b>" in answer.text
    assert page.texts("article.assistant strong") == ["bold"] and page.texts("article.assistant li") == ["one", "two"]
    assert page.texts("article.assistant td") == ["1", "2"]
    assert page.all("main img, main script, main a, nav img, nav script") == []
    assert page.browser.title == "tq-ggml chat"


def test_a_full_context_is_red_and_drops_the_oldest_messages(page, server):
    page.settings(max_tokens=16)
    page.say("Write a story about the sea. " * 28)
    page.say("Write a story about the sky. " * 24)
    page.wait(lambda: page.find("#meter").get_attribute("class") in ("amber", "red"), "no colour")
    page.say("Write a story about the sun. " * 20)
    assert "The context is full: the oldest messages are left out." in page.texts("article.note")
    assert server.get("/v1/kv")["tokens_used"] < 512


def test_the_key_is_asked_for(page):
    page.browser.execute_script("sessionStorage.clear()")
    page.browser.refresh()
    page.wait(lambda: "asks for an API key" in page.find("#figures").text, "no word about the key")
    page.type("Hello." + Keys.ENTER)
    page.wait(lambda: page.texts("article.note") == ["Error: Invalid API key"], "no error")


def test_a_phone_sees_it_all(page):
    page.browser.set_window_size(500, 800)
    try:
        assert not page.find("nav").is_displayed() and page.find("#input").is_displayed()
        page.press("☰")
        assert page.find("nav").is_displayed()
        width = page.browser.execute_script("return document.documentElement.scrollWidth - innerWidth")
        assert width <= 0
    finally:
        page.browser.set_window_size(1100, 760)


def test_only_the_page_itself_is_served(server):
    with urllib.request.urlopen(server.url + "/", timeout=60) as answer:
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert b"http://" not in answer.read().replace(b"https?:", b"")
    for path in ("/index.html", "/web/index.html", "/../server.py", "/..%2fserver.py"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(server.url + path, timeout=60)
    request = urllib.request.Request(server.url + "/", headers={"Host": "evil.example.org"})
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request, timeout=60)
