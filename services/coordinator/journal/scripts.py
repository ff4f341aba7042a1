"""The journal's tables in the store, and the Lua scripts that are its transactions.

A sample of this run is named "epoch/prompt/index". Each is in one of `issued`, `finished`, `trained`.

    issued    hash        sample -> "number first last": number of issue; attempts that may finish it
    open      hash        sample -> "attempt lineage version"; of `issued`, what a session generates turn by
                          turn: newest policy version that made any of its turns. Snapshots leave it out
    finished  hash        sample -> "number payload last attempt": of issue; where it is; which one won
    trained   hash        what of `finished` was consumed; snapshots leave it out
    consumed  sorted set  sample -> step; the samples of `trained`
    payloads  hash        payload -> encoded samples that arrived together
    refs      hash        payload -> how many samples still need it
    cursor    string      the place in the data after the last issue
    lineages  list        "name parent fork", the current one last
    counts    hash        last numbers given; bytes of payloads; samples refused, retried or dropped, by kind
    events    stream      every retry and drop with its reason

What may be long goes in parts, and a part that is repeated after a crash changes nothing. The work of one
script grows with the journal: COPY takes a tenth of a second for 300,000 samples. It touches no payload.
"""

from typing import Final

from atoll.runtime.store import Script

TABLES: Final = (
    "journal/issued",
    "journal/finished",
    "journal/trained",
    "journal/consumed",
    "journal/payloads",
    "journal/refs",
    "journal/cursor",
    "journal/lineages",
    "journal/counts",
    "journal/events",
    "journal/issued_copy",
    "journal/finished_copy",
    "journal/open",
)

_PRELUDE: Final = """
local issued, finished, trained, consumed, payloads, refs, cursor, lineages, counts, events,
  issued_copy, finished_copy, open = unpack(KEYS)
local PART = 1000  -- samples that a script takes on at once

local function words(text)  -- each once
  local list, seen = {}, {}
  for word in string.gmatch(text, '%S+') do
    if not seen[word] then list[#list + 1] = word end
    seen[word] = true
  end
  return list
end

local function fields(entry)  -- the first three numbers of an entry; nothing if it is false
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

local function untrained(samples, step)  -- without those that another step than this one consumed
  local steps, list = bulk('ZMSCORE', consumed, samples), {}
  for i, sample in ipairs(samples) do
    if not steps[i] or steps[i] == step then list[#list + 1] = sample end
  end
  return list
end

local function release(entries)  -- a payload goes with the last sample that needs it
  local released = {}
  for _, entry in ipairs(entries) do
    local _, payload = fields(entry)
    if payload then released[payload] = (released[payload] or 0) + 1 end
  end
  for payload, count in pairs(released) do
    if redis.call('HINCRBY', refs, payload, -count) == 0 then
      redis.call('HINCRBY', counts, 'bytes', -redis.call('HSTRLEN', payloads, payload))
      redis.call('HDEL', refs, payload)
      redis.call('HDEL', payloads, payload)
    end
  end
end

local function forget(samples)
  release(bulk('HMGET', finished, samples))
  release(bulk('HMGET', trained, samples))
  bulk('HDEL', issued, samples)
  bulk('HDEL', open, samples)
  bulk('HDEL', finished, samples)
  bulk('HDEL', trained, samples)
  bulk('ZREM', consumed, samples)
end

local function record(event, reason, samples)  -- counted by kind: a reason may quote a cause
  if #samples == 0 then return end
  redis.call('HINCRBY', counts, event .. ': ' .. (string.match(reason, '^(.-): ') or reason), #samples)
  redis.call('XADD', events, 'MAXLEN', '~', 100000, '*',
    'event', event .. ': ' .. reason, 'samples', table.concat(samples, ' '))
end
"""


def _script(body: str) -> Script:
    return Script(_PRELUDE + body)


# samples, cursor after them
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
redis.call('SET', cursor, ARGV[2])
""")

# sample, attempt, "lineage version", ... of sessions; answers "1" or "0" for each: whether this is the last
# attempt at an unfinished sample
OPEN: Final = _script("""
local answers = {}
for i = 1, #ARGV, 3 do
  local _, _, last = fields(redis.call('HGET', issued, ARGV[i]))
  local is_last = last == ARGV[i + 1]
  if is_last then redis.call('HSET', open, ARGV[i], ARGV[i + 1] .. ' ' .. ARGV[i + 2]) end
  answers[#answers + 1] = is_last and '1' or '0'
end
return table.concat(answers)
""")

# of each message "sample attempt sample attempt ...", and its payload; answers the bytes of all payloads,
# then of each message "1" or "0" for each sample
FINISH: Final = _script("""
local size = 0
local function finish(message, content)
  local samples, attempts = {}, {}
  for sample, attempt in string.gmatch(message, '(%S+) (%d+)') do
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
  bulk('HDEL', open, won)
  bulk('HSET', finished, values)
  if #won > 0 then
    redis.call('HSET', payloads, payload, content)
    redis.call('HSET', refs, payload, #won)
    size = size + #content
  end
  if #samples > #won then redis.call('HINCRBY', counts, 'refused', #samples - #won) end
  return table.concat(accepted)
end
local answers = {}
for i = 1, #ARGV, 2 do answers[#answers + 1] = finish(ARGV[i], ARGV[i + 1]) end
return redis.call('HINCRBY', counts, 'bytes', size) .. ' ' .. table.concat(answers, ' ')
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
record('retried', ARGV[2], retried)
""")

# samples, reason, step or "": those that this step consumed are dropped, too
DROP: Final = _script("""
local samples = untrained(words(ARGV[1]), ARGV[3])
forget(samples)
record('dropped', ARGV[2], samples)
""")

# samples, step; answers "" or why nothing was consumed
CONSUME: Final = _script("""
local samples, scores, values = words(ARGV[1]), {}, {}
local steps, done = bulk('ZMSCORE', consumed, samples), bulk('HMGET', finished, samples)
for i, sample in ipairs(samples) do
  if steps[i] then return sample .. ' was consumed before, by step ' .. steps[i] end
  if not done[i] then
    return sample .. ' is not finished: ' .. (redis.call('HEXISTS', issued, sample) == 1
      and 'still issued' or 'never issued, dropped, or covered by a checkpoint')
  end
  scores[#scores + 1] = ARGV[2]
  scores[#scores + 1] = sample
  values[#values + 1] = sample
  values[#values + 1] = done[i]
end
bulk('HDEL', finished, samples)
bulk('HSET', trained, values)
bulk('ZADD', consumed, scores)
return ''
""")

# step; answers how many samples it forgot and the bytes of all payloads. Repeat until there is none: the
# first part says already that no earlier checkpoint may build on these tables.
COMMIT: Final = _script("""
redis.call('HSET', counts, 'committed', ARGV[1])
local samples = redis.call('ZRANGEBYSCORE', consumed, '-inf', ARGV[1], 'LIMIT', 0, PART)
forget(samples)
return {#samples, redis.call('HINCRBY', counts, 'bytes', 0)}
""")

# "name parent fork"
BRANCH: Final = _script("""
redis.call('RPUSH', lineages, ARGV[1])
""")

# step: what was consumed after it is finished again; answers how many. Repeat until there is none.
UNCONSUME: Final = _script("""
local samples, values = redis.call('ZRANGEBYSCORE', consumed, '(' .. ARGV[1], '+inf', 'LIMIT', 0, PART), {}
for i, entry in ipairs(bulk('HMGET', trained, samples)) do
  values[2 * i - 1], values[2 * i] = samples[i], entry
end
bulk('HSET', finished, values)
bulk('HDEL', trained, samples)
bulk('ZREM', consumed, samples)
return #samples
""")

# step; copies `issued` and `finished` for READ; what a later step has consumed is finished. Answers the
# cursor and the lineages.
COPY: Final = _script("""
redis.call('UNLINK', issued_copy, finished_copy)
redis.call('COPY', issued, issued_copy)
redis.call('COPY', finished, finished_copy)
local later, values = redis.call('ZRANGEBYSCORE', consumed, '(' .. ARGV[1], '+inf'), {}
for i, entry in ipairs(bulk('HMGET', trained, later)) do
  values[2 * i - 1], values[2 * i] = later[i], entry
end
bulk('HSET', finished_copy, values)
return {redis.call('GET', cursor), redis.call('LRANGE', lineages, 0, -1)}
""")

# "issued" or "finished", a place ("0" first); answers the next place ("0": this was the last part),
# and samples and entries of the copy as text
READ: Final = _script("""
local copy = ARGV[1] == 'issued' and issued_copy or finished_copy
local part = redis.call('HSCAN', copy, ARGV[2], 'COUNT', PART)
if part[1] == '0' then redis.call('UNLINK', copy) end
return {part[1], table.concat(part[2], ' ')}
""")

# samples; answers the entry in `issued` of each, then that in `finished`
ENTRIES: Final = _script("""
local samples = words(ARGV[1])
return {bulk('HMGET', issued, samples), bulk('HMGET', finished, samples)}
""")

# payloads, bytes; answers of the first ones, until they are as many bytes; none for one that has gone
PAYLOADS: Final = _script("""
local answers, size = {}, 0
for _, number in ipairs(words(ARGV[1])) do
  if size >= tonumber(ARGV[2]) then break end
  local payload = redis.call('HGET', payloads, number)
  size = size + (payload and #payload or 0)
  answers[#answers + 1] = payload
end
return answers
""")

# All tables are replaced: CLEAR, then FILL_* as often as it takes, then SEAL. Without the lineages that
# SEAL adds, tables belong to no checkpoint.
CLEAR: Final = _script("""
redis.call('UNLINK', unpack(KEYS))
""")

# payload, content, payload, content, ...
FILL_PAYLOADS: Final = _script("""
for i = 1, #ARGV, 2 do
  redis.call('HSET', payloads, ARGV[i], ARGV[i + 1])
  redis.call('HINCRBY', counts, 'bytes', #ARGV[i + 1])
end
""")

# sample, entry, sample, entry, ...
FILL_ISSUED: Final = _script("""
bulk('HSET', issued, ARGV)
""")

FILL_FINISHED: Final = _script("""
for i = 1, #ARGV, 2 do  -- HSCAN may have read an entry twice
  if redis.call('HSETNX', finished, ARGV[i], ARGV[i + 1]) == 1 then
    local _, payload = fields(ARGV[i + 1])
    redis.call('HINCRBY', refs, payload, 1)
  end
end
""")

# last numbers given to samples and payloads; the cursor or ""; the lineages
SEAL: Final = _script("""
redis.call('HSET', counts, 'issued', ARGV[1], 'payloads', ARGV[2])
if ARGV[3] ~= '' then redis.call('SET', cursor, ARGV[3]) end
for i = 4, #ARGV do redis.call('RPUSH', lineages, ARGV[i]) end
""")
