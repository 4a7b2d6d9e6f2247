-- Files over keys. Each operation is one run of this script, so that it happens at once or not at all, whoever else works with the
-- same keys. lib.rs says what the keys are.
-- KEYS[1]  prefix of all keys, with the slot tag of a cluster
-- ARGV     operation, connection, number of the request (0: it changes nothing), user, group, groups by comma, arguments
local P, op, client, seq = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local uid, gid, groups = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
local A = 6 -- the arguments begin behind it
local call, band, bor, bnot = redis.call, bit.band, bit.bor, bit.bnot
local fmt = function(n) return string.format('%.0f', n) end

local EPERM, ENOENT, EACCES, EEXIST, ENOTDIR, EISDIR, EINVAL = 1, 2, 13, 17, 20, 21, 22
local EFBIG, EMLINK, ERANGE, ENOTEMPTY, ELOOP, ENODATA, EOPNOTSUPP, ESTALE, ENXIO = 27, 31, 34, 39, 40, 61, 95, 116, 6
local IFMT, IFDIR, IFREG, IFLNK = 0xf000, 0x4000, 0x8000, 0xa000
-- How many pieces of a file one run takes away at most: other clients wait for it.
local PIECES = 4096
-- Directories above each other at most, where a rename looks for a ring.
local DEPTH = 4096
local LINKS_MAX = 65000

-- What was done already is not done again: the connection broke before its answer came. One that comes after a later one was left on
-- a connection that its asker has given up, and nobody waits for it: it was done, or is asked for no more.
local done = P .. ':r:' .. client
if seq ~= '0' then
  local last = call('HMGET', done, 'q', 'v')
  if last[1] == seq then return cmsgpack.unpack(last[2]) end
  if last[1] and tonumber(last[1]) > tonumber(seq) then return { 116 } end -- ESTALE
end

local t = call('TIME')
local now = t[1] .. '.' .. string.format('%09d', tonumber(t[2]) * 1000)
local super = call('HMGET', P .. ':s', 'v', 'c', 'g')
local chunk, grace = tonumber(super[2]), tonumber(super[3])

local function I(ino) return P .. ':i:' .. ino end
local function D(ino) return P .. ':d:' .. ino end
local function O(ino) return P .. ':o:' .. ino end
local function X(ino) return P .. ':x:' .. ino end
local function C(ino) return P .. ':c:' .. ino end
local function F(ino, n) return P .. ':f:' .. ino .. ':' .. fmt(n) end
local ORPHANS = P .. ':z'

local function inode(ino)
  local v = call('HMGET', I(ino), 'm', 'n', 'u', 'g', 's', 'p', 'r', 'a', 't', 'c', 'b')
  if not v[1] then return nil end
  return { ino = ino, m = tonumber(v[1]), n = tonumber(v[2]), u = tonumber(v[3]), g = tonumber(v[4]), s = tonumber(v[5]),
    p = v[6], r = v[7], a = v[8], t = v[9], c = v[10], b = v[11] }
end
local function kind(i) return band(i.m, IFMT) end
local function attr(i)
  return { i.ino, fmt(i.m), fmt(i.n), fmt(i.u), fmt(i.g), i.r, fmt(i.s), fmt(call('ZCARD', C(i.ino))), i.a, i.t, i.c, i.b }
end
local function set(i, ...)
  for n = 1, select('#', ...), 2 do i[(select(n, ...))] = (select(n + 1, ...)) end
  call('HSET', I(i.ino), ...)
end
local function in_group(g)
  return g == gid or string.find(',' .. groups .. ',', ',' .. fmt(g) .. ',', 1, true) ~= nil
end
local function may(i, what)
  if uid == 0 then
    return band(what, 1) == 0 or kind(i) == IFDIR or band(i.m, 73) ~= 0 -- 0111
  end
  local shift = 1
  if uid == i.u then shift = 64 elseif in_group(i.g) then shift = 8 end
  return band(math.floor(i.m / shift), what) == what
end
local function owns(i) return uid == 0 or uid == i.u end
local function directory(ino, what)
  local d = inode(ino)
  if not d then return nil, ESTALE end
  if kind(d) ~= IFDIR then return nil, ENOTDIR end
  if not may(d, what) then return nil, EACCES end
  return d
end
-- A name's inode and cookie.
local function entry(dir, name)
  local v = call('HGET', D(dir), name)
  if not v then return nil end
  local ino, k, cookie = string.match(v, '^(%d+) (%d+) (%d+)$')
  return ino, k, cookie
end
local function put_name(dir, name, i)
  local cookie = call('HINCRBY', P .. ':s', 'k', 1)
  call('HSET', D(dir.ino), name, i.ino .. ' ' .. fmt(kind(i)) .. ' ' .. fmt(cookie))
  call('ZADD', O(dir.ino), fmt(cookie), name)
  set(dir, 't', now, 'c', now)
end
local function take_name(dir, name)
  call('HDEL', D(dir.ino), name)
  call('ZREM', O(dir.ino), name)
  set(dir, 't', now, 'c', now)
end
local function orphan(i) call('ZADD', ORPHANS, fmt(tonumber(t[1]) + grace), i.ino) end
local function drop(i)
  local n = kind(i) == IFDIR and 0 or i.n - 1
  set(i, 'n', n, 'c', now)
  if n == 0 then orphan(i) end
end
-- Takes away what lies from `from` on; the size that the file has then, which is larger if there was too much for one run.
local function cut(i, size)
  local first = math.ceil(size / chunk)
  local count = call('ZCOUNT', C(i.ino), fmt(first), '+inf')
  if count > PIECES then
    local kept = call('ZRANGEBYSCORE', C(i.ino), fmt(first), '+inf', 'LIMIT', count - PIECES, 1)
    first = tonumber(kept[1])
    size = first * chunk
  end
  for _, n in ipairs(call('ZRANGEBYSCORE', C(i.ino), fmt(first), '+inf')) do call('UNLINK', F(i.ino, tonumber(n))) end
  call('ZREMRANGEBYSCORE', C(i.ino), fmt(first), '+inf')
  local rest = size % chunk
  local last = F(i.ino, (size - rest) / chunk)
  if rest > 0 and call('STRLEN', last) > rest then call('SET', last, call('GETRANGE', last, 0, rest - 1)) end
  return size
end
local function truncate(i, size)
  local reached = size
  if size < i.s then reached = cut(i, size) end
  set(i, 's', fmt(reached), 't', now, 'c', now)
  i.s = reached
  return reached == size
end
local function make(dir, name, mode, rdev, target, nlink)
  local g = gid
  local setgid = band(dir.m, 1024) ~= 0 -- 02000
  if setgid then
    g = dir.g
    if band(mode, IFMT) == IFDIR then
      mode = bor(mode, 1024)
    elseif band(mode, 1032) == 1032 and uid ~= 0 and not in_group(g) then
      mode = band(mode, bnot(1024))
    end
  end
  local is_dir = band(mode, IFMT) == IFDIR
  local ino = fmt(call('HINCRBY', P .. ':s', 'n', 1))
  local size = band(mode, IFMT) == IFLNK and #target or 0
  call('HSET', I(ino), 'm', fmt(mode), 'n', fmt(nlink or (is_dir and 2 or 1)), 'u', fmt(uid), 'g', fmt(g), 's', fmt(size), 'p', dir.ino,
    'r', rdev, 'a', now, 't', now, 'c', now, 'b', now, 'l', target)
  local i = inode(ino)
  if name then
    put_name(dir, name, i)
    if is_dir then set(dir, 'n', dir.n + 1) end
  end
  return i
end
local function open_check(i, what, cuts)
  local k = kind(i)
  if k == IFDIR then return EISDIR elseif k == IFLNK then return ELOOP elseif k ~= IFREG then return EINVAL end
  if not may(i, what) then return EACCES end
  if cuts and not truncate(i, 0) then return 65535 end -- again
  return 0
end

local ops = {}

function ops.begin() -- piece bytes, grace seconds: of a file system that is not there yet
  if not super[1] then
    call('HSET', P .. ':s', 'v', '1', 'c', ARGV[A + 1], 'g', ARGV[A + 2], 'n', '1', 'k', '2')
    call('HSET', I('1'), 'm', '17407', 'n', '2', 'u', '0', 'g', '0', 's', '0', 'p', '1', 'r', '0', 'a', now, 't', now, 'c', now,
      'b', now, 'l', '') -- 041777: whoever may reach the server makes what it likes
    super = call('HMGET', P .. ':s', 'v', 'c', 'g')
  end
  return { 0, super[1], super[2], super[3] }
end

function ops.lookup() -- directory, name
  local dir, name = ARGV[A + 1], ARGV[A + 2]
  local d, e = directory(dir, 1)
  if not d then return { e } end
  local ino
  if name == '.' then ino = dir elseif name == '..' then ino = d.p else ino = entry(dir, name) end
  if not ino then return { ENOENT } end
  local i = inode(ino)
  if not i then return { ESTALE } end
  return { 0, attr(i) }
end

function ops.getattr() -- inode
  local i = inode(ARGV[A + 1])
  if not i then return { ESTALE } end
  return { 0, attr(i) }
end

function ops.readlink() -- inode
  local i = inode(ARGV[A + 1])
  if not i then return { ESTALE } end
  if kind(i) ~= IFLNK then return { EINVAL } end
  return { 0, call('HGET', I(i.ino), 'l') }
end

function ops.setattr() -- inode, mode, user, group, access time, change time (each may be empty; a time may be "now")
  local i = inode(ARGV[A + 1])
  if not i then return { ESTALE } end
  local mode, u, g, a, m = ARGV[A + 2], ARGV[A + 3], ARGV[A + 4], ARGV[A + 5], ARGV[A + 6]
  local new = band(i.m, 4095)
  if mode ~= '' then
    if not owns(i) then return { EPERM } end
    new = band(tonumber(mode), 4095)
    if uid ~= 0 and not in_group(i.g) then new = band(new, bnot(1024)) end
  end
  if u ~= '' or g ~= '' then
    u = u == '' and i.u or tonumber(u)
    g = g == '' and i.g or tonumber(g)
    if uid ~= 0 and (u ~= i.u or uid ~= i.u or not (g == i.g or in_group(g))) then return { EPERM } end
    if kind(i) ~= IFDIR and mode == '' then
      new = band(new, bnot(2048))
      if band(new, 8) ~= 0 or not (uid == 0 or in_group(i.g)) then new = band(new, bnot(1024)) end
    end
  end
  if (a ~= '' or m ~= '') and not owns(i) then
    if not (a == 'now' and m == 'now') then return { EPERM } end
    if not may(i, 2) then return { EACCES } end
  end
  if u ~= '' or g ~= '' then set(i, 'u', fmt(u), 'g', fmt(g)) end
  set(i, 'm', fmt(i.m - band(i.m, 4095) + new), 'c', now)
  if a ~= '' then set(i, 'a', a == 'now' and now or a) end
  if m ~= '' then set(i, 't', m == 'now' and now or m) end
  return { 0, attr(inode(i.ino)) }
end

function ops.truncate() -- inode, size, whether permission counts
  local i = inode(ARGV[A + 1])
  if not i then return { ESTALE } end
  if kind(i) == IFDIR then return { EISDIR } elseif kind(i) ~= IFREG then return { EINVAL } end
  if ARGV[A + 3] == '1' and not may(i, 2) then return { EACCES } end
  return { 0, truncate(i, tonumber(ARGV[A + 2])) and 1 or 0 }
end

function ops.make() -- directory, name, mode, device, target
  local d, e = directory(ARGV[A + 1], 1)
  if not d then return { e } end
  if entry(d.ino, ARGV[A + 2]) then return { EEXIST } end
  if not may(d, 3) then return { EACCES } end
  if d.n == 0 then return { ENOENT } end
  return { 0, attr(make(d, ARGV[A + 2], tonumber(ARGV[A + 3]), ARGV[A + 4], ARGV[A + 5])) }
end

function ops.create() -- directory, name, mode, what of an old one, whether it must be new, whether it is cut
  local d, e = directory(ARGV[A + 1], 1)
  if not d then return { e } end
  local ino = entry(d.ino, ARGV[A + 2])
  if ino then
    if ARGV[A + 5] == '1' then return { EEXIST } end
    local i = inode(ino)
    if not i then return { ESTALE } end
    local error = open_check(i, tonumber(ARGV[A + 4]), ARGV[A + 6] == '1')
    if error ~= 0 then return { error } end
    return { 0, attr(i) }
  end
  if not may(d, 3) then return { EACCES } end
  if d.n == 0 then return { ENOENT } end
  return { 0, attr(make(d, ARGV[A + 2], bor(IFREG, band(tonumber(ARGV[A + 3]), 4095)), '0', '')) }
end

function ops.tmpfile() -- directory, mode, whether it may get a name
  local d, e = directory(ARGV[A + 1], 3)
  if not d then return { e } end
  if d.n == 0 then return { ENOENT } end
  local i = make(d, nil, bor(IFREG, band(tonumber(ARGV[A + 2]), 4095)), '0', '', 0)
  if ARGV[A + 3] == '1' then call('HSET', I(i.ino), 'f', '1') end
  orphan(i)
  return { 0, attr(i) }
end

function ops.open() -- inode, what, whether it is cut
  local i = inode(ARGV[A + 1])
  if not i then return { ESTALE } end
  return { open_check(i, tonumber(ARGV[A + 2]), ARGV[A + 3] == '1') }
end

function ops.access() -- inode, what
  local i = inode(ARGV[A + 1])
  if not i then return { ESTALE } end
  return { may(i, tonumber(ARGV[A + 2])) and 0 or EACCES }
end

function ops.read() -- inode, offset, bytes: size of the file, and pieces, short where there is nothing
  local i = inode(ARGV[A + 1])
  if not i then return { ESTALE } end
  local at, len = tonumber(ARGV[A + 2]), tonumber(ARGV[A + 3])
  local stop = math.min(at + len, i.s)
  local pieces = {}
  while at < stop do
    local from = at % chunk
    local part = math.min(chunk - from, stop - at)
    pieces[#pieces + 1] = call('GETRANGE', F(i.ino, (at - from) / chunk), from, from + part - 1)
    at = at + part
  end
  return { 0, fmt(i.s), pieces }
end

function ops.write() -- inode, offset (or "end"), data, largest size
  local i = inode(ARGV[A + 1])
  if not i then return { ESTALE } end
  local data = ARGV[A + 3]
  local at = ARGV[A + 2] == 'end' and i.s or tonumber(ARGV[A + 2])
  local begun, taken = at, 0
  if at + #data > tonumber(ARGV[A + 4]) then return { EFBIG } end
  while taken < #data do
    local from = at % chunk
    local part = math.min(chunk - from, #data - taken)
    local n = (at - from) / chunk
    local key = F(i.ino, n)
    if from == 0 and part == chunk then
      call('SET', key, string.sub(data, taken + 1, taken + part))
    else
      call('SETRANGE', key, from, string.sub(data, taken + 1, taken + part))
    end
    call('ZADD', C(i.ino), fmt(n), fmt(n))
    at, taken = at + part, taken + part
  end
  if at > i.s then set(i, 's', fmt(at)) end
  set(i, 't', now, 'c', now)
  return { 0, fmt(begun) }
end

function ops.punch() -- inode, offset, end: gives zeroes; where it got to
  local i = inode(ARGV[A + 1])
  if not i then return { ESTALE } end
  local at, stop, steps = tonumber(ARGV[A + 2]), math.min(tonumber(ARGV[A + 3]), i.s), 0
  while at < stop and steps < PIECES do
    local found = call('ZRANGEBYSCORE', C(i.ino), fmt(math.floor(at / chunk)), '+inf', 'LIMIT', 0, 1)
    if #found == 0 then
      at = stop
      break
    end
    local n = tonumber(found[1])
    local from = math.max(at - n * chunk, 0)
    local to = math.min(stop - n * chunk, chunk)
    if to <= 0 then
      at = stop
      break
    end
    local key = F(i.ino, n)
    local there = call('STRLEN', key)
    if from == 0 and to >= there then
      call('UNLINK', key)
      call('ZREM', C(i.ino), fmt(n))
    elseif from < there then
      call('SETRANGE', key, from, string.rep('\0', math.min(to, there) - from))
    end
    at, steps = n * chunk + to, steps + 1
  end
  set(i, 't', now, 'c', now)
  return { 0, at < stop and fmt(at) or '' }
end

function ops.extend() -- inode, size at least
  local i = inode(ARGV[A + 1])
  if not i then return { ESTALE } end
  local size = tonumber(ARGV[A + 2])
  if size > i.s then set(i, 's', fmt(size)) end
  set(i, 't', now, 'c', now)
  return { 0 }
end

function ops.seek() -- inode, offset, whether data are looked for
  local i = inode(ARGV[A + 1])
  if not i then return { ESTALE } end
  local at = tonumber(ARGV[A + 2])
  if at >= i.s then return { ENXIO } end
  local n = math.floor(at / chunk)
  if ARGV[A + 3] == '1' then
    local found = call('ZRANGEBYSCORE', C(i.ino), fmt(n), '+inf', 'LIMIT', 0, 1)
    if #found == 0 then return { ENXIO } end
    return { 0, fmt(math.max(at, tonumber(found[1]) * chunk)) }
  end
  for _ = 1, PIECES do
    if not call('ZSCORE', C(i.ino), fmt(n)) then return { 0, fmt(math.min(math.max(at, n * chunk), i.s)) } end
    n = n + 1
    if n * chunk >= i.s then break end
  end
  return { 0, fmt(i.s) }
end

function ops.unlink() -- directory, name, whether it is a directory that goes
  local d, e = directory(ARGV[A + 1], 1)
  if not d then return { e } end
  local name, dirs = ARGV[A + 2], ARGV[A + 3] == '1'
  local ino = entry(d.ino, name)
  if not ino then return { ENOENT } end
  local i = inode(ino)
  if not i then return { ESTALE } end
  if not may(d, 3) then return { EACCES } end
  if band(d.m, 512) ~= 0 and not owns(d) and uid ~= i.u then return { EPERM } end -- 01000
  local is_dir = kind(i) == IFDIR
  if dirs and not is_dir then return { ENOTDIR } elseif is_dir and not dirs then return { EISDIR } end
  if is_dir and call('HLEN', D(ino)) > 0 then return { ENOTEMPTY } end
  take_name(d, name)
  if is_dir then set(d, 'n', d.n - 1) end
  drop(i)
  return { 0, ino, i.n == 0 and 1 or 0 }
end

function ops.link() -- inode, directory, name
  local i = inode(ARGV[A + 1])
  if not i then return { ESTALE } end
  local d, e = directory(ARGV[A + 2], 1)
  if not d then return { e } end
  if entry(d.ino, ARGV[A + 3]) then return { EEXIST } end
  if kind(i) == IFDIR then return { EPERM } end
  if not may(d, 3) then return { EACCES } end
  local plain = kind(i) == IFREG and band(i.m, 2048) == 0 and band(i.m, 1032) ~= 1032
  if not owns(i) and not (plain and may(i, 6)) then return { EPERM } end
  if d.n == 0 then return { ENOENT } end
  if i.n == 0 then
    if call('HGET', I(i.ino), 'f') ~= '1' then return { ENOENT } end
    call('HDEL', I(i.ino), 'f')
    call('ZREM', ORPHANS, i.ino)
  end
  if i.n >= LINKS_MAX then return { EMLINK } end
  set(i, 'n', i.n + 1, 'c', now)
  put_name(d, ARGV[A + 3], i)
  return { 0, attr(i) }
end

-- Whether directory `ino` is `below` or above it; nil if there are too many directories above each other.
local function contains(ino, below)
  for _ = 1, DEPTH do
    if below == ino then return true end
    if below == '1' then return false end
    below = call('HGET', I(below), 'p')
    if not below then return false end
  end
  return nil
end

function ops.rename() -- directory, name, directory, name, flags
  local flags = tonumber(ARGV[A + 5])
  local d, e = directory(ARGV[A + 1], 1)
  if not d then return { e } end
  local to, f = d, nil
  if ARGV[A + 3] ~= d.ino then
    to, f = directory(ARGV[A + 3], 1)
    if not to then return { f } end
  end
  local old, new = ARGV[A + 2], ARGV[A + 4]
  local ino = entry(d.ino, old)
  if not ino then return { ENOENT } end
  local i = inode(ino)
  if not i then return { ESTALE } end
  local other = entry(to.ino, new)
  if not other and flags == 2 then return { ENOENT } end
  if other and flags == 1 then return { EEXIST } end
  if not may(d, 3) or not may(to, 3) then return { EACCES } end
  if to.n == 0 then return { ENOENT } end
  local is_dir = kind(i) == IFDIR
  local function within(moved, into)
    local inside = contains(moved, into)
    if inside == nil then return ELOOP end
    return inside and EINVAL or 0
  end
  if is_dir then
    local bad = within(ino, to.ino)
    if bad ~= 0 then return { bad } end
  end
  local function sticks(dir, what) return band(dir.m, 512) ~= 0 and not owns(dir) and uid ~= what.u end
  if sticks(d, i) then return { EPERM } end
  -- A directory of somebody else gets another parent: that changes it.
  if is_dir and d.ino ~= to.ino and not may(i, 2) then return { EACCES } end
  local o
  if other then
    if other == ino then return { 0 } end
    o = inode(other)
    if not o then return { ESTALE } end
    if sticks(to, o) then return { EPERM } end
    local other_dir = kind(o) == IFDIR
    if flags == 2 then
      if other_dir then
        local bad = within(other, d.ino)
        if bad ~= 0 then return { bad } end
        if d.ino ~= to.ino and not may(o, 2) then return { EACCES } end
      end
    elseif is_dir and not other_dir then return { ENOTDIR }
    elseif other_dir and not is_dir then
      -- As Linux says it: whoever would have to be empty is looked at first where it holds what moves.
      return { contains(other, d.ino) and ENOTEMPTY or EISDIR }
    elseif other_dir and call('HLEN', D(other)) > 0 then return { ENOTEMPTY }
    end
  end
  take_name(d, old)
  if is_dir then set(d, 'n', d.n - 1) end
  if o then
    take_name(to, new)
    if kind(o) == IFDIR then set(to, 'n', to.n - 1) end
    if flags == 2 then
      put_name(d, old, o)
      if kind(o) == IFDIR then
        set(d, 'n', d.n + 1)
        set(o, 'p', d.ino)
      end
      set(o, 'c', now)
    else
      drop(o)
    end
  end
  put_name(to, new, i)
  if is_dir then
    set(to, 'n', to.n + 1)
    set(i, 'p', to.ino)
  end
  set(i, 'c', now)
  if o and flags ~= 2 and o.n == 0 then return { 0, o.ino } end
  return { 0 }
end

function ops.list() -- directory, cookie, how many: parent, and cookie, inode, kind, name of each
  local d, e = directory(ARGV[A + 1], 0)
  if not d then return { e } end
  local names = call('ZRANGEBYSCORE', O(d.ino), '(' .. ARGV[A + 2], '+inf', 'LIMIT', 0, ARGV[A + 3])
  local found = {}
  for _, name in ipairs(names) do
    local ino, k, cookie = entry(d.ino, name)
    if ino then
      for _, v in ipairs({ cookie, ino, k, name }) do found[#found + 1] = v end
    end
  end
  return { 0, d.p, #names, found }
end

-- Who may touch which names (xattr(7)).
local function named(i, name, writes)
  local what = writes and 2 or 4
  if string.sub(name, 1, 5) == 'user.' then
    local k = kind(i)
    if k ~= IFREG and k ~= IFDIR then return writes and EPERM or ENODATA end
    if writes and k == IFDIR and band(i.m, 512) ~= 0 and not owns(i) then return EPERM end
    return may(i, what) and (#name > 5 and 0 or EINVAL) or EACCES
  elseif string.sub(name, 1, 8) == 'trusted.' then
    if uid ~= 0 then return writes and EPERM or ENODATA end
    return #name > 8 and 0 or EINVAL
  elseif string.sub(name, 1, 9) == 'security.' then
    if writes and uid ~= 0 then return EPERM end
    return #name > 9 and 0 or EINVAL
  end
  return may(i, what) and EOPNOTSUPP or EACCES
end

function ops.getxattr() -- inode, name
  local i = inode(ARGV[A + 1])
  if not i then return { ESTALE } end
  local bad = named(i, ARGV[A + 2], false)
  if bad ~= 0 then return { bad } end
  local v = call('HGET', X(i.ino), ARGV[A + 2])
  if not v then return { ENODATA } end
  return { 0, v }
end

function ops.listxattr() -- inode
  local i = inode(ARGV[A + 1])
  if not i then return { ESTALE } end
  local found = {}
  for _, name in ipairs(call('HKEYS', X(i.ino))) do
    if uid == 0 or string.sub(name, 1, 8) ~= 'trusted.' then found[#found + 1] = name end
  end
  table.sort(found)
  return { 0, found }
end

function ops.setxattr() -- inode, name, value, 1 (must be new), 2 (must be there), 0 or 3 (goes); names and bytes at most
  local i = inode(ARGV[A + 1])
  if not i then return { ESTALE } end
  local name, value, how = ARGV[A + 2], ARGV[A + 3], ARGV[A + 4]
  local bad = named(i, name, true)
  if bad ~= 0 then return { bad } end
  local there = call('HEXISTS', X(i.ino), name) == 1
  if how == '1' and there then return { EEXIST } end
  if (how == '2' or how == '3') and not there then return { ENODATA } end
  if how == '3' then
    call('HDEL', X(i.ino), name)
  else
    if not there and call('HLEN', X(i.ino)) >= tonumber(ARGV[A + 5]) then return { 28 } end -- ENOSPC
    call('HSET', X(i.ino), name, value)
  end
  set(i, 'c', now)
  return { 0 }
end

function ops.keep() -- inodes that somebody has open: those without a name live on
  for n = A + 1, #ARGV do
    if call('ZSCORE', ORPHANS, ARGV[n]) then call('ZADD', ORPHANS, fmt(tonumber(t[1]) + grace), ARGV[n]) end
  end
  return { 0 }
end

function ops.reap() -- one inode without a name that nobody has kept: whether there may be more
  local found = call('ZRANGEBYSCORE', ORPHANS, '-inf', '(' .. t[1], 'LIMIT', 0, 1)
  if #found == 0 then return { 0, 0 } end
  local i = inode(found[1])
  if i and i.n == 0 then
    if i.s > 0 and kind(i) == IFREG then
      local size = cut(i, 0)
      set(i, 's', fmt(size))
      if size > 0 then return { 0, 1 } end
    end
    call('UNLINK', I(i.ino), D(i.ino), O(i.ino), X(i.ino), C(i.ino))
  end
  call('ZREM', ORPHANS, found[1])
  return { 0, 1 }
end

function ops.count() -- inodes made so far, those without a name
  return { 0, call('HGET', P .. ':s', 'n'), call('ZCARD', ORPHANS) }
end

if op ~= 'begin' and not super[1] then return { 5 } end -- EIO: somebody has emptied the server
if super[1] and super[1] ~= '1' then return { 93 } end -- EPROTONOSUPPORT
local reply = ops[op]()
if seq ~= '0' then
  call('HSET', done, 'q', seq, 'v', cmsgpack.pack(reply))
  call('EXPIRE', done, 604800) -- a week: link.rs asks again for no longer than MEMORY
end
return reply
