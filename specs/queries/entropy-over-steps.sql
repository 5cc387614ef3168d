-- Whether the policy still explores: entropy of the tokens of each step in nats, mean and lowest and highest tenth.
select run_id, step, avg(entropy) as mean,
    quantile_cont(entropy, 0.1) as lowest_tenth, quantile_cont(entropy, 0.9) as highest_tenth
from tokens
where sampled and entropy is not null
group by all order by all
