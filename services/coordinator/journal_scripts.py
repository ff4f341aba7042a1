"""The journal's tables in the store, and the Lua scripts that are its transactions.

A sample of this run is named "epoch/prompt/index". Each is in `issued` or in `finished`, never in both.

    issued    hash        sample -> "number first last": number of issue; attempts that may finish it
    finished  hash        sample -> "number payload last attempt": of issue; where it is; which one won
    payloads  hash        payload -> encoded samples that arrived together
    refs      hash        payload -> how many samples still need it
    consumed  sorted set  sample -> step; it stays in `finished`
    lineages  list        "name parent fork", the current one last
    counts    hash        last numbers given; samples refused, retried or dropped, by reason
    events    stream      every retry and drop with its reason
"""

from typing import Final

from services.runtime.store import Script

TABLES: Final = (
    "journal/issued",
    "journal/finished",
    "journal/payloads",
    "journal/refs",
    "journal/consumed",
    "journal/lineages",
    "journal/counts",
    "journal/events",
)

_PRELUDE: Final = """
local issued, finished, payloads, refs, consumed, lineages, counts, events = unpack(KEYS)

local function fields(key, sample)  -- the first three; nothing where the sample is not there
  return string.match(redis.call('HGET', key, sample) or '', '(%d+) (%d+) (%d+)')
end

local function forget(sample)  -- a payload goes with the last sample that needs it
  local _, payload = fields(finished, sample)
  redis.call('HDEL', issued, sample)
  redis.call('HDEL', finished, sample)
  redis.call('ZREM', consumed, sample)
  if payload and redis.call('HINCRBY', refs, payload, -1) == 0 then
    redis.call('HDEL', refs, payload)
    redis.call('HDEL', payloads, payload)
  end
end

local function trained(sample)
  return redis.call('ZSCORE', consumed, sample)
end

local function record(event, samples, count)
  if count == 0 then return end
  redis.call('HINCRBY', counts, event, count)
  redis.call('XADD', events, 'MAXLEN', '~', 100000, '*', 'event', event, 'samples', samples)
end
"""


def _script(body: str) -> Script:
    return Script(_PRELUDE + body)


# samples
ISSUE: Final = _script("""
for sample in string.gmatch(ARGV[1], '%S+') do
  if not fields(issued, sample) and not fields(finished, sample) then
    redis.call('HSET', issued, sample, redis.call('HINCRBY', counts, 'issued', 1) .. ' 0 0')
  end
end
""")

# "sample attempt sample attempt ...", their payload; answers "1" or "0" for each sample
FINISH: Final = _script("""
local payload = redis.call('HINCRBY', counts, 'payloads', 1)
local accepted, needed = {}, 0
for sample, attempt in string.gmatch(ARGV[1], '(%S+) (%d+)') do
  local number, first, last = fields(issued, sample)
  if number and tonumber(attempt) >= tonumber(first) then
    redis.call('HDEL', issued, sample)
    redis.call('HSET', finished, sample, table.concat({number, payload, last, attempt}, ' '))
    accepted[#accepted + 1] = '1'
    needed = needed + 1
  else
    redis.call('HINCRBY', counts, 'refused', 1)
    accepted[#accepted + 1] = '0'
  end
end
if needed > 0 then
  redis.call('HSET', payloads, payload, ARGV[2])
  redis.call('HSET', refs, payload, needed)
end
return table.concat(accepted)
""")

# samples, reason. Earlier attempts at an unfinished sample may still win; what was finished may not return.
RETRY: Final = _script("""
local count = 0
for sample in string.gmatch(ARGV[1], '%S+') do
  local number, first, last = fields(issued, sample)
  if not number then
    number, first, last = fields(finished, sample)
    first = number and last + 1
  end
  if number and not trained(sample) then
    forget(sample)
    redis.call('HSET', issued, sample, table.concat({number, first, last + 1}, ' '))
    count = count + 1
  end
end
record('retried: ' .. ARGV[2], ARGV[1], count)
""")

# samples, reason
DROP: Final = _script("""
local count = 0
for sample in string.gmatch(ARGV[1], '%S+') do
  if not trained(sample) then
    forget(sample)
    count = count + 1
  end
end
record('dropped: ' .. ARGV[2], ARGV[1], count)
""")

# samples, step; answers "" or why nothing was consumed
CONSUME: Final = _script("""
for sample in string.gmatch(ARGV[1], '%S+') do
  local step = trained(sample)
  if step then return sample .. ' was consumed before, by step ' .. step end
  if not fields(finished, sample) then
    return sample .. ' is not finished: ' .. (fields(issued, sample) and 'still issued'
      or 'never issued, dropped, or covered by a checkpoint')
  end
end
for sample in string.gmatch(ARGV[1], '%S+') do redis.call('ZADD', consumed, ARGV[2], sample) end
return ''
""")

# step
COMMIT: Final = _script("""
for _, sample in ipairs(redis.call('ZRANGEBYSCORE', consumed, '-inf', ARGV[1])) do forget(sample) end
redis.call('HSET', counts, 'committed', ARGV[1])
""")

# lineage. What was consumed after the last commit is finished again.
BRANCH: Final = _script("""
redis.call('DEL', consumed)
redis.call('RPUSH', lineages, ARGV[1])
""")

READ: Final = _script("""
return {
  redis.call('HGETALL', issued),
  redis.call('HGETALL', finished),
  redis.call('HGETALL', payloads),
  redis.call('ZRANGE', consumed, 0, -1),
  redis.call('LRANGE', lineages, 0, -1),
}
""")

# Replaces all tables: how many and which pairs of `issued`, `finished`, `payloads`; then the lineages.
REBUILD: Final = _script("""
redis.call('DEL', unpack(KEYS))
local a, num_issued, num_payloads = 1, 0, 0
local function fill(key, see)
  local last = a + 2 * tonumber(ARGV[a])
  for pair = a + 1, last, 2 do
    redis.call('HSET', key, ARGV[pair], ARGV[pair + 1])
    see(ARGV[pair + 1])
  end
  a = last + 1
end
local function see_number(value)
  num_issued = math.max(num_issued, tonumber(string.match(value, '^%d+')))
end
local function see_payload(value)
  see_number(value)
  local payload = string.match(value, '^%d+ (%d+)')
  redis.call('HINCRBY', refs, payload, 1)
  num_payloads = math.max(num_payloads, tonumber(payload))
end
fill(issued, see_number)
fill(finished, see_payload)
fill(payloads, function() end)
for lineage = a, #ARGV do redis.call('RPUSH', lineages, ARGV[lineage]) end
redis.call('HSET', counts, 'issued', num_issued, 'payloads', num_payloads)
""")
