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

local function words(text)  -- each once
  local list, seen = {}, {}
  for word in string.gmatch(text, '%S+') do
    if not seen[word] then list[#list + 1] = word end
    seen[word] = true
  end
  return list
end

local function fields(entry)  -- the first three numbers of an entry; nothing where it is false
  return string.match(entry or '', '(%d+) (%d+) (%d+)')
end

local function bulk(command, key, list)  -- in parts, since Lua unpacks some thousand words at most
  local answers = {}
  for first = 1, #list, 1000 do
    local part = redis.call(command, key, unpack(list, first, math.min(first + 999, #list)))
    for i = 1, type(part) == 'table' and #part or 0 do answers[#answers + 1] = part[i] end
  end
  return answers
end

local function untrained(samples)
  local steps, list = bulk('ZMSCORE', consumed, samples), {}
  for i, sample in ipairs(samples) do
    if not steps[i] then list[#list + 1] = sample end
  end
  return list
end

local function forget(samples)  -- a payload goes with the last sample that needs it
  local released = {}
  for _, entry in ipairs(bulk('HMGET', finished, samples)) do
    local _, payload = fields(entry)
    if payload then released[payload] = (released[payload] or 0) + 1 end
  end
  for payload, count in pairs(released) do
    if redis.call('HINCRBY', refs, payload, -count) == 0 then
      redis.call('HDEL', refs, payload)
      redis.call('HDEL', payloads, payload)
    end
  end
  bulk('HDEL', issued, samples)
  bulk('HDEL', finished, samples)
  bulk('ZREM', consumed, samples)
end

local function record(event, samples)
  if #samples == 0 then return end
  redis.call('HINCRBY', counts, event, #samples)
  redis.call('XADD', events, 'MAXLEN', '~', 100000, '*',
    'event', event, 'samples', table.concat(samples, ' '))
end
"""


def _script(body: str) -> Script:
    return Script(_PRELUDE + body)


# samples
ISSUE: Final = _script("""
local samples, fresh = words(ARGV[1]), {}
local known, done = bulk('HMGET', issued, samples), bulk('HMGET', finished, samples)
local number = redis.call('HINCRBY', counts, 'issued', #samples) - #samples
for i, sample in ipairs(samples) do
  if not (known[i] or done[i]) then
    fresh[#fresh + 1] = sample
    fresh[#fresh + 1] = number + i .. ' 0 0'
  end
end
bulk('HSET', issued, fresh)
""")

# "sample attempt sample attempt ...", their payload; answers "1" or "0" for each sample
FINISH: Final = _script("""
local samples, attempts = {}, {}
for sample, attempt in string.gmatch(ARGV[1], '(%S+) (%d+)') do
  samples[#samples + 1] = sample
  attempts[#attempts + 1] = attempt
end
local entries, payload = bulk('HMGET', issued, samples), redis.call('HINCRBY', counts, 'payloads', 1)
local accepted, won, values, is_won = {}, {}, {}, {}
for i, sample in ipairs(samples) do
  local number, first, last = fields(entries[i])
  if number and not is_won[sample] and tonumber(attempts[i]) >= tonumber(first) then
    accepted[i], is_won[sample] = '1', true
    won[#won + 1] = sample
    values[#values + 1] = sample
    values[#values + 1] = table.concat({number, payload, last, attempts[i]}, ' ')
  else
    accepted[i] = '0'
  end
end
bulk('HDEL', issued, won)
bulk('HSET', finished, values)
if #won > 0 then
  redis.call('HSET', payloads, payload, ARGV[2])
  redis.call('HSET', refs, payload, #won)
end
redis.call('HINCRBY', counts, 'refused', #samples - #won)
return table.concat(accepted)
""")

# samples, reason. Earlier attempts at an unfinished sample may still win; what was finished may not return.
RETRY: Final = _script("""
local samples, retried, values = untrained(words(ARGV[1])), {}, {}
local known, done = bulk('HMGET', issued, samples), bulk('HMGET', finished, samples)
for i, sample in ipairs(samples) do
  local number, first, last = fields(known[i] or done[i])
  if number then
    retried[#retried + 1] = sample
    values[#values + 1] = sample
    values[#values + 1] = table.concat({number, known[i] and first or last + 1, last + 1}, ' ')
  end
end
forget(retried)
bulk('HSET', issued, values)
record('retried: ' .. ARGV[2], retried)
""")

# samples, reason
DROP: Final = _script("""
local samples = untrained(words(ARGV[1]))
forget(samples)
record('dropped: ' .. ARGV[2], samples)
""")

# samples, step; answers "" or why nothing was consumed
CONSUME: Final = _script("""
local samples, scores = words(ARGV[1]), {}
local steps, done = bulk('ZMSCORE', consumed, samples), bulk('HMGET', finished, samples)
for i, sample in ipairs(samples) do
  if steps[i] then return sample .. ' was consumed before, by step ' .. steps[i] end
  if not done[i] then
    return sample .. ' is not finished: ' .. (redis.call('HEXISTS', issued, sample) == 1
      and 'still issued' or 'never issued, dropped, or covered by a checkpoint')
  end
  scores[#scores + 1] = ARGV[2]
  scores[#scores + 1] = sample
end
bulk('ZADD', consumed, scores)
return ''
""")

# step
COMMIT: Final = _script("""
forget(redis.call('ZRANGEBYSCORE', consumed, '-inf', ARGV[1]))
redis.call('HSET', counts, 'committed', ARGV[1])
""")

# lineage. What was consumed after the last commit is finished again.
BRANCH: Final = _script("""
redis.call('DEL', consumed)
redis.call('RPUSH', lineages, ARGV[1])
""")

# step; of what was consumed, only up to it
READ: Final = _script("""
return {
  redis.call('HGETALL', issued),
  redis.call('HGETALL', finished),
  redis.call('HGETALL', payloads),
  redis.call('ZRANGEBYSCORE', consumed, '-inf', ARGV[1]),
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
