"""Settings of LiteLLM's proxy, made of a spec. Not for: running it (`gateway.py`).

LiteLLM takes no backend out of its pool that refuses connections, and `least-busy` prefers the one
with nothing in flight, which a dead one is: so routing follows health checks. It does take one out
that answers 404, so a backend is only ever asked for the model that it serves.
Next file: `gateway.py`.
"""

from __future__ import annotations

from typing import Any

from octavo.platform.spec import Backend, Spec

KEY = "ENGINE_KEY"  # the variable that holds the engine's key in the cluster


def backends_of(spec: Spec, urls: list[str]) -> list[Backend]:
    """Those that the spec names, else the engine's own at these addresses."""
    return spec.gateway.backends or [Backend(url=url, key_env=KEY) for url in urls]


def config_of(spec: Spec, urls: list[str]) -> dict[str, Any]:
    """What LiteLLM's configuration file holds."""
    gateway = spec.gateway
    router: dict[str, Any] = {
        "routing_strategy": gateway.strategy,
        "num_retries": gateway.retries,
        "allowed_fails": gateway.allowed_fails,
        "cooldown_time": gateway.cooldown,
        "timeout": gateway.timeout,
        "stream_timeout": gateway.stream_timeout,
        "enable_pre_call_checks": False,  # the engine counts tokens, and its refusal is understood
    }
    if gateway.fallbacks:
        router["fallbacks"] = [{name: list(to)} for name, to in gateway.fallbacks.items()]
    if gateway.context_window_fallbacks:
        router["context_window_fallbacks"] = [
            {name: list(to)} for name, to in gateway.context_window_fallbacks.items()
        ]
    if gateway.redis_host:
        router |= {
            "redis_host": gateway.redis_host,
            "redis_port": 6379,
            "redis_password": "os.environ/REDIS_PASSWORD",
        }
    return {
        "model_list": [_entry(spec, one) for one in backends_of(spec, urls)],
        "router_settings": router,
        "litellm_settings": {
            "callbacks": [],
            "drop_params": False,
            "request_timeout": gateway.timeout,
        },
        "general_settings": {
            "master_key": f"os.environ/{gateway.master_key_env}",
            "background_health_checks": True,
            "health_check_interval": gateway.health_interval,
            "enable_health_check_routing": True,
            "disable_spend_logs": True,
        },
    }


def _entry(spec: Spec, backend: Backend) -> dict[str, Any]:
    served = backend.model or spec.served_name
    params: dict[str, Any] = {
        "model": f"hosted_vllm/{served}",
        "api_base": backend.url,
        "api_key": f"os.environ/{backend.key_env}" if backend.key_env else "none",
        "timeout": spec.gateway.timeout,
        "stream_timeout": spec.gateway.stream_timeout,
        "max_parallel_requests": backend.max_parallel,
        "weight": backend.weight,
    }
    info = {"mode": "chat", "health_check_timeout": 10, "health_check_max_tokens": 1}
    return {
        "model_name": backend.name or served,
        "litellm_params": params,
        "model_info": info,
    }
