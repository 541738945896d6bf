"""A harness of verifiers that asks the model within this process."""

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire


class ChatHarness(vf.Harness):
    """One request for each turn, with the conversation so far."""

    EXECUTES_CODE = NEEDS_CONTAINER = False
    SUPPORTS_RESUME = True  # verifiers calls `launch` for each turn

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        """Ask once. verifiers records the answer on its way."""
        messages = [message_to_wire(message) for message in data.prompt]
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=300, headers=headers, trust_env=False) as http:
            body = {"model": ctx.model, "messages": messages}
            (await http.post(f"{endpoint}/chat/completions", json=body)).raise_for_status()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["ChatHarness"]
