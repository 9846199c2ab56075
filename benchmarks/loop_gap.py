"""For how long one large request keeps others from being answered.

    python benchmarks/loop_gap.py --model MODEL [--tokens 100000] [--megabytes 18] [--rounds 3]

The real server over the pretended core of `frontend.py`. A prober of its own process asks /health
every few milliseconds on one connection while large requests are sent one after the other; the
figure is the longest time that an answer took. On a machine that does other work, look at the row
"nothing" first. Not for: how long the large requests themselves take.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from frontend import wait_for

EVERY = 0.004  # seconds between probes
QUIET = 1.0  # seconds of the row "nothing"


def probe(address: str) -> None:
    """Asks until its input ends; prints each answer's moment and seconds, one line each."""
    host = address.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=60)
    print("started", flush=True)
    found = []
    running = True

    def stop(number, frame) -> None:
        nonlocal running
        running = False

    signal.signal(signal.SIGTERM, stop)
    while running:
        start = time.monotonic()
        connection.request("GET", "/health/live")
        connection.getresponse().read()
        found.append((start, time.monotonic() - start))
        time.sleep(EVERY)
    print(json.dumps(found), flush=True)


def words(number: int) -> str:
    """Ordinary words, about one token each."""
    some = ("the", "of", "and", "a", "to", "in", "is", "you", "that", "it", "he", "was", "for")
    return " ".join(random.choices(some, k=number))


def requests(args: argparse.Namespace, address: str) -> dict[str, tuple[str, bytes]]:
    """Name -> (path, body)."""
    prompt = words(args.tokens)
    message = [{"role": "user", "content": prompt}]
    turns = [
        {"role": role, "content": words(args.tokens // 40)}
        for _ in range(20)
        for role in ("user", "assistant")
    ]
    ids = [random.randrange(300, 49_000) for _ in range(args.tokens)]
    more = {"model": "m", "max_tokens": 2}
    large = words(args.megabytes * 10**6 // 4)[: args.megabytes * 10**6]
    many = [random.randrange(300, 49_000) for _ in range(2**20)]
    bodies = {
        "nothing": ("", {}),
        "chat": ("/v1/chat/completions", {**more, "messages": message}),
        "chat, 40 turns": ("/v1/chat/completions", {**more, "messages": turns}),
        "completion": ("/v1/completions", {**more, "prompt": prompt}),
        "completion of ids": ("/v1/completions", {**more, "prompt": ids}),
        "tokenize": ("/tokenize", {"prompt": prompt}),
        "detokenize": ("/detokenize", {"tokens": ids}),
        f"tokenize {args.megabytes} MB": ("/tokenize", {"prompt": large}),
        "tokenize 0.8 MB, strings": (
            "/tokenize",
            {"prompt": large[: 8 * 10**5], "return_token_strs": True},
        ),
        "detokenize 2^18 ids": ("/detokenize", {"tokens": many[: 2**18]}),
        "detokenize 2^20, refused": ("/detokenize", {"tokens": many}),
        f"chat {args.megabytes} MB, refused": (
            "/v1/chat/completions",
            {**more, "messages": [{"role": "user", "content": large}]},
        ),
    }
    return {name: (path, json.dumps(body).encode()) for name, (path, body) in bodies.items()}


def send(address: str, path: str, body: bytes) -> str:
    """Sends one request; its status and the seconds it took."""
    if not path:
        time.sleep(QUIET)
        return ""
    start = time.monotonic()
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=120)
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.read()
    return f"{response.status} after {time.monotonic() - start:.2f} s"


def measure(args: argparse.Namespace, address: str) -> None:
    prober = subprocess.Popen(
        [sys.executable, __file__, "--probe", address], stdout=subprocess.PIPE, text=True
    )
    assert prober.stdout is not None
    prober.stdout.readline()
    spans = []
    for name, (path, body) in requests(args, address).items():
        time.sleep(0.3)
        start = time.monotonic()
        answer = send(address, path, body)
        time.sleep(0.05)
        spans.append((name, start, time.monotonic(), answer))
    prober.send_signal(signal.SIGTERM)
    answers = json.loads(prober.stdout.read())
    for name, start, end, answer in spans:
        took = [seconds for moment, seconds in answers if start - 0.05 <= moment <= end]
        print(f"  {name:24} longest answer {1000 * max(took):6.1f} ms   {answer}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--megabytes", type=int, default=18)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--probe", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.probe:
        probe(args.probe)
        return
    log = Path("loop_gap.log")
    script = str(Path(__file__).with_name("frontend.py"))
    command = [sys.executable, script, "--model", args.model, "--role", "server"]
    with log.open("wb") as out:
        server = subprocess.Popen([*command, "--context", "131072"], stdout=out, stderr=out)
    try:
        address = wait_for(log, r"event=listening address=(\S+)", server)
        wait_for(log, r"event=(ready)", server)
        for number in range(args.rounds):
            print(f"round {number + 1}:")
            measure(args, address)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(20)


if __name__ == "__main__":
    main()
