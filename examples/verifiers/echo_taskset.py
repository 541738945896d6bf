"""A taskset of verifiers that knows nothing of splice: say a word, then say it again."""

import httpx
import verifiers.v1 as vf

WORDS = ("yes", "no", "maybe")


class EchoData(vf.TaskData):
    """One task's row."""

    word: str


class EchoTask(vf.Task[EchoData]):
    """Scored by how often the word is said."""

    @vf.reward
    async def says_it(self, trace: vf.Trace) -> float:
        """Share of the turns that contain the word."""
        said = [message.content or "" for message in trace.assistant_messages]
        return sum(self.data.word in text for text in said) / len(said)


class EchoTaskset(vf.Taskset[EchoTask]):
    """One task for each word."""

    def load(self):
        """The tasks."""
        for word in WORDS:
            yield EchoTask(EchoData(prompt=f"Say {word}.", word=word), self.config.task)


class EchoHarness(vf.Harness):
    """Two turns of a conversation, in this process."""

    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Ask twice; the second request carries the conversation so far."""
        messages = [{"role": "user", "content": data.prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=300, headers=headers, trust_env=False) as http:
            for _ in range(2):
                body = {"model": ctx.model, "messages": messages}
                reply = await http.post(f"{endpoint}/chat/completions", json=body)
                message = reply.raise_for_status().json()["choices"][0]["message"]
                messages += [
                    {"role": "assistant", "content": message["content"] or ""},
                    {"role": "user", "content": "Again."},
                ]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["EchoHarness", "EchoTaskset"]
