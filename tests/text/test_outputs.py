"""The records that callers of the Python interface get."""

from __future__ import annotations

from octavo.outputs import CompletionOutput, Logprob, RequestOutput


def test_outputs():
    choice = CompletionOutput(0, " Paris", [5], logprobs=[{5: Logprob(-0.1, 1, " Paris")}])
    assert not choice.finished()
    choice.finish_reason = "stop"
    assert choice.finished()
    output = RequestOutput(
        "r1", "France?", [1, 2], outputs=[choice], finished=True,
        of_a_later_version=3,
    )  # fmt: skip
    shown = repr(output)
    assert shown.startswith("RequestOutput(request_id='r1', prompt='France?', ")
    assert "finished=True" in shown
    assert "lora_request=None" not in shown.replace(repr(choice), "")
    assert "of_a_later_version" not in shown
    assert "prompt=None" in repr(RequestOutput("r", None, None, outputs=[], finished=False))
