"""Starts the agent API in the engine's process, where a configuration asks for it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from lmkv.config import Config
from lmkv.errors import ConfigError
from lmkv.vllm import compat
from lmkv.vllm.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from lmkv.agent.http import AgentServer

logger = logging.getLogger("lmkv.vllm")


def start_agent(config: Config, vllm_config: Any, scheduler: Scheduler, chunk_size: int) -> AgentServer | None:
    """The service, or None: none is wanted, or its address is taken, which the log says.

    Raises ConfigError for an address that is not this machine's alone.
    """
    if config.agent_listen is None:
        return None
    try:
        from lmkv.agent.engines import Engines
        from lmkv.agent.http import Address, AgentServer, application
        from lmkv.agent.service import CacheService
    except ImportError as error:
        raise ConfigError(f'agent_listen needs fastapi and uvicorn: pip install "lmkv[agent]" ({error})') from error
    service = CacheService(
        scheduler.store,
        scheduler.keys_of,
        compat.tokenizer(vllm_config),
        chunk_size=chunk_size,
        pin_ttl=config.pin_ttl,
        requests=scheduler.recent.snapshot,
    )
    first, number = Address(config.agent_listen), compat.local_engine(vllm_config)
    address = first.of_engine(number)
    engines = Engines(number, lambda other: first.of_engine(other).url, config.token)
    try:
        server = AgentServer(lambda: application(service, config.token, engines), address)
    except OSError as error:
        logger.error("lmkv: the agent API cannot listen at %s: %s; going on without it", address.text, error)
        return None
    logger.info("lmkv: the agent API is at %s", server.url)
    return server
