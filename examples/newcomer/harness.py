"""The harness: anything that calls a model and leaves its work in a directory."""

from openai import AsyncOpenAI


async def one_question(request):
    """Ask once and write the answer down."""
    client = AsyncOpenAI(base_url=f"{request.base_url}/v1", api_key=request.key)
    question = {"role": "user", "content": request.prompt}
    answer = await client.chat.completions.create(
        model=request.model, messages=[question], max_completion_tokens=16
    )
    (request.workspace / "answer.txt").write_text(answer.choices[0].message.content or "")
