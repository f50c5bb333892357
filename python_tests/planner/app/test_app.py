"""`rtp-ext plan --app`: what the page shows is what the command and the printed Python compute."""

import contextlib
import io
import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from argparse import Namespace

import pytest

from rtp_ext.__main__ import _parser, main
from rtp_ext.host import loopback
from rtp_ext.observe.schedule import schedules
from rtp_ext.observe.timeline import Lockstep, timeline
from rtp_ext.planner.app.settings import COMPARED, SEARCHED, arguments, refilled, settings_of
from rtp_ext.planner.app.view import compared, found, passes_of, view_of


def _options(*words: str) -> Namespace:
    return _parser().parse_args(["plan", "--app", *words])


def _told(capsys, command: str) -> dict:
    """What a command of the page prints with --json."""
    words = shlex.split(command.replace("\\\n", " "))
    assert words[0] == "rtp-ext"
    assert main([*words[1:], "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def _printed(python: str) -> list[str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(python, {})
    return out.getvalue().splitlines()


STARTS = [
    [],
    ["--model", "gpt-3-xl", "--gpu", "a100-80gb", "--gpus", "12", "--gpus-per-node", "4", "--link", "pcie"],
    ["--rtp", "4", "--gpus", "8", "--travel", "int8", "--bundle", "recompute", "--seq", "1024", "--no-fused-loss"],
    [*("--layers", "6", "--hidden", "768", "--heads", "12", "--family", "gpt"), "--plan", "rtp=2", "--plan", "zero=1"],
    ["--model", "llama-3-8b", "--pp", "2", "--stage-layers", "15+17", "--global-batch", "16", "--fp8", "--compiled"],
]


@pytest.mark.parametrize("start", STARTS, ids=lambda start: " ".join(start[:2]) or "as it opens")
def test_the_command_and_the_python_give_the_numbers_of_the_page(capsys, start):
    settings = settings_of(_options(*start))
    if "--pp" in start:
        with pytest.raises(ValueError, match="compiled and fused_norm are of the torch stack"):
            view_of(arguments(settings))
        settings |= {"compiled": False, "fp8": True}
    view = view_of(arguments(settings))
    plans = _told(capsys, view.command)["plans"]
    lines = _printed(view.python)
    assert len(plans) == len(lines) == len(view.rows) >= 1
    for row, plan, line in zip(view.rows, plans, lines, strict=True):
        shown = (row.memory.peak_allocated_bytes, row.memory.verdict, row.time.step_seconds)
        assert shown == (plan["peak_allocated_bytes"], plan["verdict"], plan["time"]["step_seconds"])
        assert line == " ".join(map(str, shown))
        assert plan["plan"] == row.name and plan["components_bytes"] == row.memory.components
    if start and any(word.startswith("--r") or word == "--plan" for word in start):  # as without the page
        assert main(["plan", *start, *([] if "--layers" in start else ["--model", "llama-3-8b"]), "--json"]) == 0
        direct = json.loads(capsys.readouterr().out)["plans"]
        assert [plan["time"] for plan in direct] == [plan["time"] for plan in plans]


def test_search_and_comparison_are_those_of_the_command(capsys):
    settings = settings_of(_options("--model", "gpt-3-xl", "--gpus", "4"))
    result = found(tuple(arguments(settings, SEARCHED)))
    plans = _told(capsys, result.command)["plans"]
    assert [plan["time"]["step_seconds"] for plan in plans] == [plan.step_seconds for plan in result.plans] != []
    assert [plan["plan"] for plan in plans] == [*result.names]
    printed = _printed(result.python)
    assert [line.split()[1] for line in printed] == [repr(plan.step_seconds) for plan in result.plans]
    cells, command, python = compared(tuple(arguments(settings, COMPARED)))
    told = _told(capsys, command)
    assert [(cell["model"], cell["gpus"], cell["winner"]) for cell in told] == [
        ("gpt-3-xl", 4, cell.winner) for cell in cells
    ]
    assert [line.rpartition(" ")[2] for line in _printed(python)] == [str(cell.advantage) for cell in cells]
    assert {cell.link for cell in cells} == {"NVLink", "PCIe", "400 Gb/s"}


def test_the_page_offers_what_the_command_does(capsys, tmp_path):
    small = tmp_path / "small.json"
    small.write_text(json.dumps({"base": "rtx-4090-24gb", "name": "no host", "host_bytes_per_s": 0.0}))
    for words, told in (
        (("--model", "llama-3-405b", "--gpus", "1"), "also with states on the host"),
        (
            ("--model", "llama-3-8b", "--cluster", str(small), "--gpus", "4"),
            "Training adapters alone fits: .*frozen=nf4",
        ),
        (("--model", "gpt-3-xl", "--gpus", "1"), "no ring among them: it takes at least 2 GPUs"),
    ):
        result = found(words)
        main(["plan", *words])
        printed = capsys.readouterr()
        assert re.search(told, result.message), result.message
        assert "".join(result.message.split()) in "".join((printed.out + printed.err).split())


def test_the_timeline_is_that_of_the_prediction():
    settings = settings_of(_options("--plan", "rtp=4,gradient_route=direct"))  # planned operation by operation
    view = view_of(arguments(settings))
    passes = passes_of(view.model, view.cluster, view.rows[0].strategy)
    assert {each.pass_ for each in passes} == {"forward", "backward"} and len(passes) >= 8
    for each in passes:
        assert max(event.end for event in each.events) == each.seconds > 0
        assert each.seconds * each.chunks <= each.step_seconds * (1 + 1e-9)
        assert len(each.events) == len(each.kinds)
        for lane in {event.lane for event in each.events}:
            row = [event for event in each.events if event.lane == lane]
            assert all(a.end <= b.start + 1e-12 for a, b in itertools.pairwise(row)), (each.operation, lane)
    products = [event for event in passes[0].events if "forward" in event.label]
    assert len(products) == 4
    assert passes_of(view.model, view.cluster, view_of(["--model", "gpt-3-xl", "--zero", "3"]).rows[0].strategy) == []


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_one_rank_in_lockstep_does_what_it_does_among_all(pass_):
    every = schedules(4, op="mlp", pass_=pass_)
    times = {"compute_time": 1.0, "hop_time": 1.7, "copy_time": 0.25}
    durations = dict.fromkeys(("forward", "dgrad", "wgrad"), 1.0) | dict.fromkeys(("weight", "gradient"), 1.7)
    events = Lockstep(every[0]).events({**durations, "copy": 0.25, "add": 0.25})
    among = {event.step: event for event in timeline(every, **times) if event.rank == 0}
    assert len(events) == len(among) > 6
    for event in events:
        other = among[event.step]
        assert (event.label, event.lane) == (other.label, other.lane)
        assert (event.start, event.end) == pytest.approx((other.start, other.end), abs=1e-12)


def test_default_plans_fit_and_follow_the_cluster_until_they_are_edited():
    settings = settings_of(_options())
    assert settings["plans"].splitlines()[:2] == ["rtp=8", "zero=3,recompute=selective"]
    verdicts = {row.title: row.memory.verdict for row in view_of(arguments(settings)).rows}
    assert verdicts["RTP, ring of 8"] == verdicts["fully_shard"] == "fits" and verdicts["DDP 8"] == "out of memory"
    filled = {name: settings[name] for name in ("plans", "global_batch")}
    larger = refilled({**settings, "gpus": "16"}, filled)
    assert larger["global_batch"] == "16" and "tp=8,sequence_parallel,zero=1" in larger["plans"]
    edited = refilled({**settings, "gpus": "16", "plans": "rtp=4"}, filled)
    assert (edited["plans"], edited["global_batch"]) == ("rtp=4", "16")
    assert refilled({**settings, "gpus": "no"}, filled) == {**settings, "gpus": "no"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"gpus": "1.5"}, "argument --gpus: invalid int value: '1.5'"),
        ({"gpus": "0"}, "expected gpus to be a whole number of at least 1, got 0"),
        ({"plans": "rpt=8"}, "unknown field 'rpt'.*; did you mean rtp"),
        ({"plans": "rtp=3"}, "divisible by tp . pp . cp . rtp = 3, got 8"),
        ({"more": "--sequence 5"}, "unknown argument --sequence"),
        ({"more": "--when"}, "expected no --when"),
        ({"more": "'"}, "got No closing quotation"),
        ({"hf_config": "none.json", "model": ""}, "none.json: no such file"),
        ({"seq": "-1"}, "expected seq to be a whole number of at least 1"),
    ],
)
def test_wrong_fields_are_told_in_the_words_of_the_command(changes, sentence):
    settings = {**settings_of(_options()), **changes}
    with pytest.raises(ValueError, match=sentence):
        view_of(arguments(settings))


def test_arguments_that_are_refused(capsys):
    def told(*words):
        try:
            status = main(["plan", *words])
        except SystemExit as ended:
            status = ended.code
        return status, capsys.readouterr().err

    assert told("--port", "1") == (
        2,
        "rtp-ext plan: error: argument --port: expected --app beside it; see rtp-ext plan --help\n",
    )
    assert told("--app", "--json") == (2, "rtp-ext plan: error: --app shows plans: expected no --json beside it\n")
    fixed = "--when compares plans over links and tokens: expected a model, --gpu, --gpus and --recipe at most"
    for beside in (("--seq", "4"), ("--rtp", "8"), ("--link", "pcie")):
        assert told("--when", "--model", "gpt-3-xl", *beside) == (2, f"rtp-ext plan: error: {fixed}\n")
    assert "--when --gpus needs a model" in told("--when", "--gpus", "8")[1]
    status, error = told("--app", "--port", "70000")
    assert status == 2 and error.count("\n") == 1 and "expected --port of 0 to 65535, got 70000" in error
    assert loopback("127.0.0.1") and loopback("::1") and loopback("localhost")
    assert not loopback("0.0.0.0") and not loopback("example.org")


def test_without_dash_one_line_says_what_to_install_and_without_app_nothing_is_imported():
    hidden = (
        "import sys; sys.modules['dash'] = None; from rtp_ext.__main__ import main; sys.exit(main(['plan', '--app']))"
    )
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "rtp-ext plan: error: --app needs Dash: pip install 'rtp-ext[app]'\n"
    light = (
        "import sys; from rtp_ext.__main__ import main; main(['plan', '--model', 'gpt-3-xl', '--rtp', '8']); "
        "sys.exit(int(any(name in sys.modules for name in ('dash', 'flask', 'plotly', 'torch'))))"
    )
    assert subprocess.run([sys.executable, "-c", light], capture_output=True, timeout=60).returncode == 0


# -- in a browser ------------------------------------------------------------------------------------------------------


@pytest.fixture
def browser(tmp_path):
    """Headless Chromium, with the addresses that it asked for in its performance log."""
    pytest.importorskip("dash", reason="needs Dash: pip install 'rtp-ext[app]'")
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium, which drives a browser")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("needs chromium and chromedriver: Debian's packages chromium and chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--window-size=1280,1000",
        f"--user-data-dir={tmp_path}",
    ):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield started
    started.quit()


@pytest.fixture
def page_addresses():
    """Starts pages on free ports and returns their addresses."""
    command = [sys.executable, "-m", "rtp_ext", "plan", "--app", "--port", "0"]
    with contextlib.ExitStack() as started:

        def start(number, *words):
            pages = [
                started.enter_context(subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True))
                for _ in range(number)
            ]
            for each in pages:
                started.callback(each.terminate)
            return [re.search(r"http://127\.0\.0\.1:\d+/[\w-]+/", each.stdout.readline())[0] for each in pages]

        yield start


def _until(condition, seconds=10.0):
    """Waits for a condition that does not hold at once, and returns its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "the page did not change as expected"
        time.sleep(0.05)
    return value


def test_the_page_in_a_browser(capsys, browser, page_addresses):
    (page,) = page_addresses(1)
    script = browser.execute_script

    def text(name):
        return script("return document.getElementById(arguments[0])?.textContent ?? ''", name)

    def shown():
        return script(
            "return [...document.querySelectorAll('.card')].map(card => [card.querySelector('.badge').textContent,"
            "card.querySelector('[data-bytes]').dataset.bytes, card.querySelector('[data-seconds]').dataset.seconds,"
            "card.querySelector('[data-bytes]').textContent, card.querySelector('[data-seconds]').textContent])"
        )

    def compare_with_the_command():
        plans = _told(capsys, text("plans-command"))["plans"]
        for card, plan in zip(shown(), plans, strict=True):
            held, seconds = plan["peak_allocated_bytes"], plan["time"]["step_seconds"]
            assert card == [plan["verdict"], repr(held), repr(seconds), f"{held / 1e9:.1f}", f"{seconds:.4g}"]
        return plans

    def fill(name, value):
        box = browser.find_element("id", name)
        box.clear()
        box.send_keys(value + "\t")

    browser.get(page)
    _until(shown)
    first = compare_with_the_command()
    assert len(first) == 4
    table = script("return [...document.querySelectorAll('#memory .total td')].map(cell => cell.textContent)")
    assert table == [f"{plan['peak_allocated_bytes'] / 1e9:.2f}" for plan in first]
    steps = script("return [...document.querySelectorAll('#time .total td')].map(cell => cell.textContent)")[:4]
    assert steps == [f"{plan['time']['step_seconds']:.4g}" for plan in first]
    _until(lambda: text("search-command"))
    found_seconds = script(
        "return [...document.querySelectorAll('#search [data-seconds]')].map(c => c.dataset.seconds)"
    )
    told = _told(capsys, text("search-command"))["plans"]
    assert found_seconds == [repr(plan["time"]["step_seconds"]) for plan in told] != []
    assert script("return document.querySelectorAll('#timeline .step').length") > 30

    fill("gpus", "16")
    _until(lambda: "--gpus 16" in text("plans-command"))
    second = compare_with_the_command()
    assert [plan["time"]["gpus"] for plan in second] == [16] * 4 and second != first

    fill("gpus", "1.5")
    told = _until(lambda: text("error"))
    assert told == "Argument --gpus: invalid int value: '1.5'."
    assert not browser.find_element("id", "shown").is_displayed()  # no number of the fields before
    fill("gpus", "8")
    _until(lambda: not text("error") and "--gpus 8" in text("plans-command"))
    assert compare_with_the_command() == first

    requests = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {each["params"]["request"]["url"] for each in requests if each["method"] == "Network.requestWillBeSent"}
    outside = [
        url
        for url in asked
        if not url.startswith((page, "data:", "blob:", "chrome:", "chrome-untrusted:", "devtools:"))
    ]
    assert len(asked) > 5 and outside == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


OUTSIDE = """
const outside = (part, whole) => {
  const [a, b] = [part.getBoundingClientRect(), whole.getBoundingClientRect()];
  return a.left < b.left - 1 || a.right > b.right + 1 || a.bottom > b.bottom + 40;
};
const parts = (inner, outer) => [...document.querySelectorAll(outer)].flatMap(
  whole => [...whole.querySelectorAll(inner)].filter(part => outside(part, whole)).map(part => part.textContent));
return [...parts("*", ".card"), ...parts(".label", ".axis"),
  ...[...document.querySelectorAll(".step span")].filter(text => text.offsetWidth && outside(text, text.parentElement))
    .map(text => text.textContent),
  ...(document.documentElement.scrollWidth > window.innerWidth ? ["page"] : [])];
"""


def test_nothing_leaves_its_place(browser, page_addresses):
    plans = ("tp=2,pp=2,rtp=4", "zero=3,tp=4", "zero=3", "rtp=8,zero=0", "pp=16")
    large = ("--model", "llama-3-405b", "--gpu", "h200-141gb", "--gpus", "16")
    (page,) = page_addresses(1, *large, *(word for plan in plans for word in ("--plan", plan)))
    found = {}
    for width in (1280, 901, 500):
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(page)
        _until(lambda: len(browser.find_elements("css selector", ".step")) > 10, 30.0)
        assert len(browser.find_elements("css selector", ".card")) == len(plans)
        found[width] = browser.execute_script(OUTSIDE)
    assert found == {1280: [], 901: [], 500: []}


def test_only_the_owner_reaches_the_page_and_no_name_from_elsewhere_leads_here():
    pytest.importorskip("dash", reason="needs Dash: pip install 'rtp-ext[app]'")
    from rtp_ext.planner.app import page

    client = page.app(settings_of(_options()), "127.0.0.1", "SECRET").server.test_client()

    def status(path, host="127.0.0.1:8050", **headers):
        return client.get(path, headers={"Host": host, **headers}).status_code

    for path in ("/SECRET/", "/SECRET", "/SECRET/_dash-layout", "/SECRET/_dash-dependencies"):
        assert status(path) == 200, path
    for path in (
        "/",
        "",
        "/_dash-layout",
        "/SECRE/",
        "/SECRETS/",
        "//SECRET/",
        "/secret/",
        "/SECR\u00c9T/_dash-layout",
    ):
        assert status(path) == 403, path
    for host in ("localhost", "[::1]:80"):
        assert status("/SECRET/", host) == 200, host
    for host in ("attacker.example:8050", "", "["):
        assert status("/SECRET/", host) == 403, host
    assert status("/SECRET/", Origin="http://127.0.0.1:8050") == 200
    for origin in ("http://attacker.example", "http://127.0.0.1:8051", "null"):
        assert status("/SECRET/", Origin=origin) == 403, origin
    assert client.post("/_dash-update-component", headers={"Host": "localhost"}, json={}).status_code == 403

    anywhere = page.app(settings_of(_options()), "0.0.0.0", "SECRET").server.test_client()
    assert anywhere.get("/SECRET/", headers={"Host": "node7:8050"}).status_code == 200
    assert anywhere.get("/", headers={"Host": "node7:8050"}).status_code == 403


def test_each_start_prints_an_address_of_its_own(page_addresses):
    pytest.importorskip("dash", reason="needs Dash: pip install 'rtp-ext[app]'")
    first, second = page_addresses(2)
    assert len(first.rpartition("/")[0].rpartition("/")[2]) >= 32 and first.split("/")[3] != second.split("/")[3]
    with urllib.request.urlopen(first, timeout=10) as answer:
        assert answer.status == 200
    for wrong in (first.rsplit("/", 2)[0] + "/", f"{first.rsplit('/', 2)[0]}/{second.split('/')[3]}/"):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(wrong, timeout=10)
