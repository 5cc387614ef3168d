-- The tokens whose probability changed most within a step, with what was written: 20 over all runs.
select run_id, step, rollout_id, position, token_id, ratio, clipped, advantage, response
from (
    select *, abs(logprob - old_logprob) as change from tokens
    where sampled and ratio is not null order by change desc limit 20
) join rollouts using (run_id, step, rollout_id)
order by change desc
