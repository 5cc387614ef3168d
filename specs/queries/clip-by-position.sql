-- Where in a response the objective stops learning: the share of clipped tokens by position, in steps of 16 tokens.
select run_id, position // 16 * 16 as from_position, avg(clipped::int) as clip_fraction, count(*) as num_tokens
from tokens
where sampled and clipped is not null
group by all order by all
