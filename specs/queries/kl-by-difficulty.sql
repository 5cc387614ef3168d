-- Whether the policy moves further from the reference on hard prompts: KL(policy || reference) in nats a token, and
-- reward, by quarter of the run's prompts: 1 holds those with the lowest mean reward.
with prompts as (
    select run_id, prompt_id, avg(reward) as mean_reward from rollouts group by all
), quarters as (
    select *, ntile(4) over (partition by run_id order by mean_reward) as quarter from prompts
)
select run_id, quarter, avg(old_logprob - ref_logprob) as kl, avg(mean_reward) as reward, count(*) as num_tokens
from quarters join rollouts using (run_id, prompt_id) join tokens using (run_id, step, rollout_id)
where sampled and ref_logprob is not null
group by all order by all
