"""Agents that are other projects' harnesses, in .venv-gateway; the row names the harness and what its user
says next. Whole answers are checked by OpenAI's pydantic types as they come in."""

import asyncio
from collections.abc import Sequence
from typing import Any

import openai
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from atoll import AgentSession
from tests.gateway.api_agents import SYSTEM, THINKING, task_and_more
from tests.gateway.chat_clients import check_type

TYPES = {"completions": ChatCompletion, "responses": Response}  # by the end of the path
MAX_TURNS = 8


def check_body(response: Any) -> None:
    if response.status_code == 200:
        check_type(TYPES[response.url.path.rpartition("/")[2]], response.json(), allowed=THINKING)


async def check_response(response: Any) -> None:
    await response.aread()
    check_body(response)


def check_sync_response(response: Any) -> None:
    response.read()
    check_body(response)


def checked_client(session: AgentSession) -> openai.AsyncOpenAI:
    http_client = openai.DefaultAsyncHttpxClient(trust_env=False, event_hooks={"response": [check_response]})
    return openai.AsyncOpenAI(
        base_url=session.base_url, api_key=session.api_key, http_client=http_client, max_retries=0
    )


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def pydantic_ai(session: AgentSession) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    task, more = task_and_more(session)
    async with checked_client(session) as client:
        model = OpenAIChatModel(session.model, provider=OpenAIProvider(openai_client=client))
        agent = Agent(model, tools=[add], system_prompt=SYSTEM)
        history: Any = None
        for text in (task, *more):
            history = (await agent.run(text, message_history=history)).all_messages()


async def openai_agents(session: AgentSession, model_kind: str) -> None:
    import agents
    from agents.models.openai_chatcompletions import OpenAIChatCompletionsModel
    from agents.models.openai_responses import OpenAIResponsesModel

    agents.set_tracing_disabled(True)
    kinds = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
    task, more = task_and_more(session)
    async with checked_client(session) as client:
        model = kinds[model_kind](session.model, client)
        agent = agents.Agent("adder", instructions=SYSTEM, model=model, tools=[agents.function_tool(add)])
        items: list[Any] = []
        for text in (task, *more):
            result = await agents.Runner.run(agent, [*items, {"role": "user", "content": text}])
            items = result.to_input_list()


async def langgraph(session: AgentSession) -> None:
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    task, more = task_and_more(session)
    async with checked_client(session) as client:
        model = ChatOpenAI(
            model=session.model,
            async_client=client.chat.completions,
            root_async_client=client,
            api_key=session.api_key,
            base_url=session.base_url,
        )
        graph = create_react_agent(model, [add], prompt=SYSTEM)
        messages: list[Any] = []
        for text in (task, *more):
            messages = (await graph.ainvoke({"messages": [*messages, ("user", text)]}))["messages"]


async def smolagents(session: AgentSession) -> None:
    from smolagents import OpenAIModel, ToolCallingAgent, tool

    task, _ = task_and_more(session)
    hooks = {"response": [check_sync_response]}
    with openai.DefaultHttpxClient(trust_env=False, event_hooks=hooks) as http_client:
        model = OpenAIModel(
            session.model,
            api_base=session.base_url,
            api_key=session.api_key,
            client_kwargs={"http_client": http_client, "max_retries": 0},
        )
        agent = ToolCallingAgent([tool(add)], model, max_steps=MAX_TURNS, verbosity_level=0)
        await asyncio.to_thread(agent.run, task)


class Shell:
    """Answers commands without running them."""

    config: Any = None

    def execute(self, action: dict[str, Any], cwd: str = "") -> dict[str, Any]:
        from minisweagent.exceptions import Submitted

        if action["command"] == "submit":
            raise Submitted({"role": "exit", "content": "", "extra": {"exit_status": "Submitted"}})
        return {"output": f"ran {action['command']}", "returncode": 0, "exception_info": ""}

    def get_template_vars(self, **values: Any) -> dict[str, Any]:
        return values

    def serialize(self) -> dict[str, Any]:
        return {}


async def mini_swe_agent(session: AgentSession) -> None:
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.models.litellm_model import LitellmModel

    task, _ = task_and_more(session)
    model = LitellmModel(
        model_name=f"openai/{session.model}",
        cost_tracking="ignore_errors",
        model_kwargs={"api_base": session.base_url, "api_key": session.api_key},
    )
    agent = DefaultAgent(
        model, Shell(), system_template=SYSTEM, instance_template="{{task}}", step_limit=MAX_TURNS
    )
    await asyncio.to_thread(agent.run, task)


async def harness_agent(session: AgentSession) -> None:
    name, _, kind = session.extra["client"].partition(":")
    if name == "openai_agents":
        await openai_agents(session, kind)
    else:
        await {
            "pydantic_ai": pydantic_ai,
            "langgraph": langgraph,
            "smolagents": smolagents,
            "mini_swe_agent": mini_swe_agent,
        }[name](session)


HARNESSES: Sequence[str] = (
    "pydantic_ai",
    "openai_agents:chat",
    "openai_agents:responses",
    "langgraph",
    "smolagents",
    "mini_swe_agent",
)
