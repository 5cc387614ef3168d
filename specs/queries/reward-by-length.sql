-- Whether length pays: reward by tenth of the response length, 1 the shortest.
with ranked as (
    select run_id, num_tokens, reward, ntile(10) over (partition by run_id order by num_tokens) as tenth
    from rollouts where reward is not null
)
select run_id, tenth, min(num_tokens) as shortest, max(num_tokens) as longest, avg(reward) as reward,
    count(*) as num_responses
from ranked
group by all order by all
