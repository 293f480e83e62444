"""Generation by SGLang servers, through their native API."""

from __future__ import annotations

from typing import Any

from verl.config.errors import RequestError, RunError
from verl.rollout.base import Sampling
from verl.rollout.http import REASONS, Failed, HttpEngine, Refused, Row, Sampled, Server, common, probe


class SglangEngine(HttpEngine):
    """A ``RolloutEngine`` on SGLang servers (0.5.2 or newer); ``HttpEngine`` tells of the arguments.

    Weights are whole ones. SGLang tells logprobs after the temperature but before any truncation, so ``top_p`` and
    ``top_k`` are refused. It heeds a row's seed with ``--enable-deterministic-inference`` only, and also ends rows at
    the model's own end-of-sequence ids.
    """

    def body(self, server: Server, row: Row, sampling: Sampling) -> tuple[str, dict[str, Any]]:
        return "/generate", {
            "rid": row.name,
            "input_ids": list(row.request.prompt_ids),
            "sampling_params": common(sampling, self.eos)
            | {
                "max_new_tokens": sampling.max_new_tokens,
                "min_new_tokens": 0,
                "sampling_seed": row.key & (1 << 31) - 1,
                "ignore_eos": not self.eos,  # it would switch off stop_token_ids, too
                "no_stop_trim": True,
            },
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "stream": False,
        }

    def read(self, answer: Any, sampling: Sampling) -> Sampled:
        told, reason = answer["meta_info"]["output_token_logprobs"], answer["meta_info"]["finish_reason"]["type"]
        return tuple(token for _, token, *_ in told), tuple(float(logprob) for logprob, *_ in told), REASONS[reason]

    async def likeliest(self, server: Server, sampling: Sampling) -> float:
        path, body = self.body(server, probe(), sampling)
        answer = await self.call(server, "POST", path, body | {"top_logprobs_num": 1})
        return answer["meta_info"]["output_top_logprobs"][0][0][0]

    def untold(self, what: str) -> str:
        if what == "temperature":
            return "start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB, or sample with temperature 1"
        return "SGLang can't do otherwise: set top_p to 1 and top_k to 0"

    async def install(self, server: Server) -> None:
        server.mark = self.kept.name if self.kept is not None else ""
        try:
            await self.call(
                server,
                "POST",
                "/update_weights_from_disk",
                {
                    "model_path": str(self.kept),
                    "weight_version": server.mark,
                    "flush_cache": True,
                    "abort_all_requests": True,  # of a restarted server: rows of the wrong weights
                },
            )
            await self.call(server, "POST", "/flush_cache")
            path, body = self.body(server, probe(), Sampling(greedy=True, max_new_tokens=1))
            answer = await self.call(server, "POST", path, body)
        except Refused as error:
            kind = RequestError if error.status in (404, 405) else RunError
            raise kind(f"{server.url} did not take the weights in {self.kept}: it {error}") from None
        except Failed as error:
            if error.status != 500:
                raise
            raise RunError(f"the weights in {self.kept} were not taken: {error}") from None
        if not await self.holds(server, answer):
            raise RunError(f"{server.url} does not answer with the weight_version it was given: SGLang 0.5.2 would")

    async def holds(self, server: Server, answer: Any) -> bool:
        if self.kept is None or isinstance(answer, Refused):
            return True
        return isinstance(answer, dict) and answer.get("meta_info", {}).get("weight_version") == server.mark

    async def ended(self, server: Server, row: Row) -> None:
        await self.call(server, "POST", "/abort_request", {"rid": row.name})
