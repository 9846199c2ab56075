"""Rules over Dockerfiles: pinned bases, several stages, no root. Not for: building them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from octavo.platform.findings import Finding
from octavo.platform.sources import Sources, Text

FROM = re.compile(r"^FROM\s+(?:--\S+\s+)?(\S+)", re.MULTILINE | re.IGNORECASE)
USER = re.compile(r"^USER\s+(\S+)", re.MULTILINE | re.IGNORECASE)
ARGUMENT = re.compile(r"^ARG\s+(\w+)=(\S+)", re.MULTILINE | re.IGNORECASE)


def is_dockerfile(name: str) -> bool:
    """By its name."""
    return name.rpartition("/")[2] == "Dockerfile" or name.endswith(".Dockerfile")


def dockerfile(sources: Sources) -> Iterator[Finding]:
    """All of them."""
    for text in sources.texts:
        if is_dockerfile(text.file):
            yield from _pinned(text)
            yield from _user(text)
            yield from _layers(text)


def _pinned(text: Text) -> Iterator[Finding]:
    arguments = dict(ARGUMENT.findall(text.text))
    stages = re.findall(r"(?im)^FROM\s.*\sAS\s+(\S+)", text.text)
    for match in FROM.finditer(text.text):
        image = re.sub(r"\$\{?(\w+)\}?", lambda one: arguments.get(one[1], ""), match.group(1))
        tag = image.rpartition("/")[2].partition(":")[2]
        if image in (*stages, "scratch") or "@sha256:" in image:
            continue
        if tag in ("", "latest"):
            yield _found(
                text, match.start(), f"{image} is another image tomorrow", "name a version"
            )


def _user(text: Text) -> Iterator[Finding]:
    users = list(USER.finditer(text.text))
    last = text.text.rfind("\nFROM ")
    final = [match for match in users if match.start() > last]
    if not final or final[-1].group(1).partition(":")[0] in ("root", "0"):
        at = final[-1].start() if final else max(0, last)
        yield _found(text, at, "what it runs is run as root", "make a user, and name it with USER")


def _layers(text: Text) -> Iterator[Finding]:
    for match in re.finditer(r"apt-get install", text.text):
        command = text.text[match.start() :].split("\n\n")[0]
        if "rm -rf /var/lib/apt/lists" not in command or "--no-install-recommends" not in command:
            problem = "apt-get install leaves its lists, or takes what is only recommended"
            remedy = "add --no-install-recommends, and rm -rf /var/lib/apt/lists/* in the same RUN"
            yield _found(text, match.start(), problem, remedy)
    for match in re.finditer(r"(?m)^ADD\s+https?://", text.text):
        yield _found(text, match.start(), "ADD of an address is not checked", "use curl and a hash")


def _found(text: Text, at: int, problem: str, remedy: str) -> Finding:
    return Finding("dockerfile", text.file, text.line_of(at), problem, remedy)


RULES = (dockerfile,)
