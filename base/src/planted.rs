//! Planted bugs: deliberately broken variants of the production code, for proving that the tests which look for
//! such bugs can find them.
//!
//! A place that a variant breaks asks `planted(Bug::X)`. Without the feature `planted` (every shipped build) that
//! is the constant `false` and the broken branch is not compiled; with it, one bug at a time can be chosen by
//! [`choose`]. Nothing but the crates that hunt for the bugs may turn the feature on, and only by a feature of
//! their own, since cargo unites the features of a workspace.

/// A deliberately broken variant. Each says what goes wrong, so that the list is the list of what the tests prove.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Bug {
    /// None: the code as it is shipped.
    None = 0,
    /// The root is written without waiting for the pages and copies that it refers to.
    NoFenceBeforeRoot = 1,
    /// The last page of a transaction is written, and its write-back never started.
    PageNotFlushed = 2,
    /// The root record is written, and its write-back never started.
    RootNotFlushed = 3,
    /// Every root record goes to slot 0, over the one that is valid.
    RootInPlace = 5,
    /// The root is flipped, and the pages are written afterwards.
    RootBeforePages = 6,
    /// Data is copied to where the extents say, and its write-back never started.
    CopiesNotFlushed = 7,
    /// Zeroes of a truncated or punched file are written, and their write-back never started.
    ZeroesNotFlushed = 8,
    /// A page of the published tree is free for use as soon as the working state drops it.
    PageReused = 9,
    /// A block of the published state is free for use as soon as the working state drops it.
    BlockReused = 10,
    /// The body of a chunk is put into the stream ring, and its write-back never started.
    ChunkNotFlushed = 11,
    /// A chunk counts as persistent before the fence: fsync returns early.
    NoFenceAfterChunk = 12,
    /// fsync is answered before the log is fetched.
    AckUnfetched = 13,
    /// Recovery takes a chunk of the stream ring without judging its entries.
    ChunkUnverified = 14,
    /// The checksum of a log entry is not compared.
    EntryUnverified = 15,
    /// The checksum of a root record is not compared.
    RootUnverified = 16,
    /// Recovery does not look for the next chunk at the beginning of the stream ring.
    RingWrap = 17,
    /// The record of the oldest chunk is written over the valid one.
    RingRecordInPlace = 18,
    /// The root record says that one chunk more is published than is.
    RootAhead = 20,
    /// A node that starts forgets what its stream ring holds beyond the published state.
    ReplayForgotten = 21,
    /// Of two valid root records the older is taken.
    OldRootWins = 22,
    /// A chunk of the stream is published when only a part of it is applied.
    ChunkPartlyPublished = 23,
    /// A node that starts drops the logs of its clients.
    LogsDropped = 24,
    /// A client is written into the table, and the write-back never started.
    RowNotFlushed = 25,
    /// A block that several files share is free as soon as one of them gives it up.
    SharedFreed = 30,
    /// A block that several files share is overwritten in place.
    SharedInPlace = 31,
    /// A block that an unpublished operation reads is overwritten before that is published.
    ReadOverwritten = 32,
    /// What a client holds is noted, and its write-back never started.
    HeldNotFlushed = 26,
    /// A chunk at the end of the ring lacks room for what ends it.
    RingPastEnd = 27,
    /// Work that puts a chunk into the ring ends without a fence of its own.
    KeptUnfenced = 34,
    /// Work that copies what is published ends without a fence of its own.
    CopiesUnfenced = 35,
    /// A chunk that is on its way into the ring is acknowledged.
    KeptEarly = 290,
    /// What is on its way into the ring is published.
    PublishedUnkept = 291,
    /// A client is told that what is on its way into the ring is settled.
    SettledUnkept = 292,
    /// The table says that a number is made use of before what makes use of it is in the ring.
    MadeUnkept = 293,
    /// A chunk that is on its way into the ring is read from there.
    KeptReadEarly = 294,
    /// What was read of a log counts although it was to be read again since.
    ReadOutlives = 295,
    /// A log counts as read to its end while that is under way.
    DrainUnread = 296,
    /// An answer shows what is on its way into the ring of the head.
    AnsweredUnkept = 297,
    /// Fsync is acknowledged before every member has the chunk.
    EarlyAck = 50,
    /// A lease is granted before the last changes of its inode are on every member.
    GrantBeforeReplicated = 51,
    /// A request is answered before the content it describes is published here.
    GrantBeforePublished = 52,
    /// A recall is answered without waiting for the operation under way.
    RecallIgnoresOperation = 53,
    /// A recall is answered before the log of its client is fetched.
    RecallSkipsLog = 54,
    /// Frames of an epoch that is over are taken.
    OldEpochAccepted = 55,
    /// The head does not ask whether the client may.
    PermissionSkipped = 56,
    /// The head does not ask whether the client holds the lease.
    LeaseUnchecked = 57,
    /// A client makes inodes of any number.
    NumberUnchecked = 58,
    /// An entry of an epoch that has not begun is taken.
    FutureEpochAccepted = 59,
    /// A client may free inodes, which only the service does.
    ReapAllowed = 60,
    /// A directory can be moved below itself.
    CycleAllowed = 61,
    /// A directory that has names can be removed.
    NotEmptyRemoved = 62,
    /// A member skips the last of several entries of a chunk.
    EntrySkipped = 63,
    /// The stream ring takes a little more than it has room for.
    RingOverrun = 64,
    /// A joining node is not sent the content of the last file.
    SnapshotPieceLost = 66,
    /// A new head does not fetch what another member has beyond it.
    TakeOverShort = 67,
    /// A joining node counts as caught up when the snapshot is on its way.
    CaughtUpEarly = 68,
    /// A client that was expelled is not told.
    ExpelledNotTold = 69,
    /// What a dead client left in its log is dropped.
    DeadTailDropped = 70,
    /// A node without the coordinator goes on serving under its leases.
    FencedServes = 71,
    /// Entries sent again are carried out again.
    RetryTwice = 72,
    /// The coordinator does not persist the removal of a member.
    CoordinatorForgets = 73,
    /// A member takes a chunk whose entries fail their checksum.
    DamageIgnored = 74,
    /// An entry larger than a batch is never fetched.
    BatchLimit = 75,
    /// The answer to any recall takes the lease back.
    StaleRecall = 76,
    /// A joining node keeps what it held before.
    JoinKeepsOld = 77,
    /// A client of a returning member hears that all it did is on every member.
    ProgressOverstated = 78,
    /// A member acknowledges a chunk that came before its predecessor.
    GapAcknowledged = 79,
    /// Copies that hostd could not do are taken for done.
    BadCopiesIgnored = 80,
    /// A new head keeps the leases of nodes that left the chain.
    LostNodeKept = 81,
    /// Leases on their way back are missing in the report to a new head.
    ReportedTooFew = 82,
    /// A reader is granted a lease beside a writer.
    ReaderBesideWriter = 83,
    /// Chunks leave the ring before they are published.
    PublishedTooFar = 84,
    /// What was fetched again counts as fetched when more has settled meanwhile.
    RewindAhead = 85,
    /// A client whose end was told while the head was out of reach lives on there.
    EndUnheard = 86,
    /// Leases of a suspected member are void before it can know.
    SuspectedAtOnce = 87,
    /// A snapshot reads blocks that nothing has been copied to yet.
    MovedContent = 88,
    /// A snapshot goes on although a clone reads what it copies later.
    CloneWhileJoining = 89,
    /// A lease that is given back takes with it what was granted since.
    ReleaseUnnamed = 90,
    /// A joining node takes the rest of a snapshot for all of it.
    SnapshotHeadless = 91,
    /// A node that may be in the chain already is sent a snapshot, and wipes itself.
    PromisedWiped = 92,
    /// What a client made with a number that it was handed out is not written down.
    NumberAgain = 120,
    /// A new head puts entries into the stream before it knows how far the stream goes.
    UnreadyOrders = 121,
    /// A lease that is given back is free before the entries sent before are in the stream.
    ReleaseOvertakes = 122,
    /// A new head does not look which of its own clients' entries are acknowledged already.
    ProgressForgotten = 123,
    /// That an operation was refused is not told to its client.
    RefusalUntold = 124,
    /// A head whose ring is full waits for a publication to release chunks.
    RoomUnsought = 125,
    /// Half a root record stays where it is when a node starts.
    HalfRootKept = 33,
    /// A node that does not wait for hostd lets it copy on.
    LateCopies = 110,
    /// A client uses its leases although their time is over.
    LapseIgnored = 93,
    /// The coordinator says too short a time in which leases of a lost member may hold.
    LapseShort = 94,
    /// A node that joins anew keeps the clients of an earlier run.
    JoinKeepsLogs = 95,
    /// A node that starts forgets which leases its clients hold.
    HeldForgotten = 96,
    /// A node enters the chain when a process of it that is no more had caught up.
    CaughtUpUnnamed = 97,
    /// Pages of the state that a snapshot is made of are reused while it is made.
    ViewReused = 130,
    /// What lies before a part of the extent list is taken for a hole.
    GapIsHole = 150,
    /// An entry is summed from the caller's memory, which may change meanwhile.
    SummedElsewhere = 151,
    /// An entry is appended, and not fenced before the call returns.
    AppendNotFenced = 152,
    /// A client writes over log space that is not reclaimed.
    LaneOverrun = 153,
    /// Readers of log bytes are not told that these are about to be written over.
    FrontierLate = 154,
    /// A read takes bytes from the log that were written over meanwhile.
    FrontierIgnored = 155,
    /// A request slot that another thread has taken since is given back.
    SlotCollectedTwice = 156,
    /// A client appends without saying that it is inside an operation.
    NotInside = 157,
    /// A client does not look at its leases again inside an operation.
    LeaseNotLookedAt = 158,
    /// What is appended after the seal of an expelled client counts as done.
    SealIgnored = 159,
    /// The lease is not looked at again when a copy is made.
    ReadUnchecked = 160,
    /// An answer about an inode is taken in though another operation or lease came since.
    OldAnswerInstalled = 161,
    /// Extents are taken in that were asked for before an own operation moved blocks.
    OldExtents = 162,
    /// What a name led to is remembered under another lease than it was asked under.
    NameOfBefore = 163,
    /// A listing is remembered though the lease was lost in the middle of it.
    ListOfBefore = 164,
    /// An attribute's value counts under another lease than it was asked under.
    AnswerOfBefore = 165,
    /// Own bytes that an answer does not reflect yet are forgotten.
    PiecesDropped = 166,
    /// Extents are kept over a change of who may read.
    MovedKept = 167,
    /// Extents that were asked for before a file was cut count afterwards.
    CutExtentsKept = 168,
    /// The extents of a file are kept though a copy shares its blocks now.
    SourceKept = 169,
    /// Another thread writes in the middle of a write of several entries.
    LongWriteIgnored = 170,
    /// An append of several entries goes on where it was, though others have appended.
    AppendGoesOn = 171,
    /// An open file is counted when it is pinned only, and a close in between unpins it.
    PinBeforeCount = 172,
    /// Who removes the name of a file that it has open does not say so.
    UnlinkedClosed = 173,
    /// Fsync does not tell that operations were lost with a session.
    LossUntold = 174,
    /// The attributes that come with a name count though the client has changed the inode since.
    LookedUpOld = 175,
    /// What was opened in an earlier session is not made known in the next.
    PinForgotten = 176,
    /// Refusals of a session are counted from what a file that is open saw in an earlier one.
    RefusalsKept = 178,
    /// A write to which no space was promised has returned before it is judged.
    JudgementUnawaited = 179,
    /// What the mount's pages are worth is told by the time of modification, which programs set back.
    PagesByTime = 180,
    /// The mount does not tell the kernel to drop pages that are older than the answer.
    DropUnsent = 181,
    /// The mount answers, and the kernel's older pages go afterwards.
    DropAfterAnswer = 182,
    /// A request is answered while pages are dropped for another.
    DropUnawaited = 183,
    /// What a mount's kernel writes counts as being in its pages.
    OwnWriteTrusted = 184,
    /// Pages are dropped before the kernel knows how long the file is.
    SizeUnstored = 185,
    /// Pages are kept over an open though the file has changed.
    OpenKeepsPages = 186,
    /// Attributes are kept though the pages are older.
    AttrsOverPages = 187,
    /// A directory's attributes are told while names count that may be wrong.
    NamesUnawaited = 189,
    /// That a name does not exist is kept though the file system does not say so.
    AbsentKept = 190,
    /// Names are kept by a kernel that does not look at their directory.
    NamesUnchecked = 191,
    /// Attributes are kept of an inode that is not counted yet as known.
    KeptUncounted = 192,
    /// A kernel that is about to know an inode is told once to drop its attributes.
    UnknownSkipped = 193,
    /// A file that was cut is told as it is, with pages and a size that stay.
    CutTold = 194,
    /// What the kernel reads in is not noted.
    ReadUnnoted = 195,
    /// Attributes that were asked for before a write are taken for those of a file that was cut.
    CutAsked = 188,
    /// The largest size that the kernel may think of is not forgotten when it changes the file.
    MostUnsettled = 196,
    /// A member answers a client although operations of that client are in its ring only.
    OwnWritesUnseen = 131,
    /// A log with an entry that never gets whole is waited for.
    BrokenLogKept = 132,
    /// A node that ends in order tells its clients before every member has what they did.
    ClosedEarly = 133,
    /// Space that is promised to one client is given to another.
    RoomUnkept = 134,
    /// What a client says in memory that it has closed is not looked at when a lease goes back.
    ClosedUnheard = 135,
    /// What was made and not opened stays pinned by who made it.
    MadeStaysPinned = 136,
    /// What an agent's report names is added to what a client was known to have open.
    UnpinLost = 137,
    /// What was closed is not told again when the operations before it are.
    CloseNotRepeated = 138,
    /// A recall is put behind the first grant that is held for its client.
    RecallBetween = 139,
    /// A lease goes back although what was done under it lies behind what another thread is still to write.
    GapRecalled = 140,
    /// What a request says that is closed is written down when it is carried out, not when it is taken.
    UnpinTaken = 141,
    /// An agent forgets what a session had open when that ends.
    PastForgotten = 144,
    /// What clients of a lost node have open is freed.
    PinsOfLostFreed = 145,
    /// A new head frees what the clients of lost nodes may have open.
    TakeOverFrees = 146,
    /// A file without a name is made although the lease on its directory went back since that was looked at.
    GroundsUnchecked = 177,
    /// A snapshot for a node that joins says nothing of blocks that are reserved.
    ReservedUnsent = 197,
    /// A file without a name that another thread is opening is changed before the service knows that it is open.
    OpeningCounts = 142,
    /// Whether an attribute exists is asked by its value, which who may change it may not be allowed to read.
    ExistenceByValue = 200,
    /// Who may write to a file and not read it is not told that it has no capabilities.
    CapabilityHidden = 201,
    /// A directory that comes into another by an exchange is not asked whether it may be written.
    ExchangedUnasked = 202,
    /// That somebody was allowed to read a file when he opened it is forgotten when its mode changes.
    ReadRightForgotten = 207,
    /// Who owns a file is not noted as one who may write to it when he opens it, and then it is another's.
    OwnerTrusted = 208,
    /// What a process was allowed when it opened a file is forgotten when its session ends.
    RightsOfPastLost = 209,
    /// Who makes a file without a name where a limit may bar it is not told.
    NamelessUnawaited = 211,
    /// A limit of inodes is not asked for when an inode gets another owner.
    GivenUncounted = 212,
    /// What was refused while an allocation waited for its own verdict is never told.
    RefusedBetween = 213,
    /// Of a value that does not fit one reply the parts behind the second are left out.
    PartLost = 215,
    /// Extents are asked for where they are missing, also if others between are not known.
    ListApart = 241,
    /// Who cuts a file by its name is asked before the lease that it is cut under.
    TruncatedUnasked = 246,
    /// What a member has named in an earlier epoch counts in its next report.
    NamedBefore = 247,
    /// What did not fit in a turn is not taken up again.
    RestForgotten = 248,
    /// Blocks that were free once are given back to the medium although somebody has taken them since.
    TakenDiscarded = 249,
    /// An operation goes into the stream as one entry, whatever it costs.
    EntriesUncut = 251,
    /// A user has as many leases as its clients ask for.
    LeasesUncounted = 252,
    /// A user's requests are served as fast as they come.
    RequestsUncounted = 253,
    /// Set-id bits are taken for ended by an operation that may be refused.
    EndedSetidTrusted = 310,
    /// What was promised to an operation is taken from the account each time it is tried.
    RedeemedTwice = 311,
    /// Who may not write to a file gives it another name.
    LinkOfOthers = 312,
    /// Further names of a file count in no quota.
    LinksUncounted = 313,
    /// Extended attributes count in no quota.
    AttributesUncounted = 314,
    /// What a client has made and closed is reported as one of its fresh numbers, as long as its node is behind.
    ClosedReported = 315,
    /// A node that was sent a snapshot knows only the inode numbers that are in it.
    NumbersForgotten = 316,
    /// A directory is not empty by what a limit bars from it.
    RefusedIsThere = 317,
    /// A head hands out inode numbers that an earlier one may have handed out.
    NumbersOfAnother = 318,
    /// After a write that went elsewhere than the kernel believes the mount drops its pages later, not when it reads next.
    MisplacedLater = 319,
    /// What a client closed is looked for after what it opens again is asked for.
    ClosedLater = 320,
    /// A chunk that is kept until it is applied is taken for another that has its number since.
    RecentMistaken = 326,
    /// A log is taken whole, whoever waits beside it.
    FloodFirst = 327,
    /// A directory is read under a lease beside those who change its names jointly.
    ReaderBesideJoint = 223,
    /// Under a joint lease more is changed than the names of the directory.
    JointChangesAll = 224,
    /// What did not fit in a joint directory counts as refused, and is told to whoever syncs.
    JointRefusalCounts = 225,
    /// Who changes a name in a joint directory is not told that it did not fit.
    UntakenUntold = 226,
    /// Names of a joint directory are told as this node has them, however far behind it is.
    JointAnsweredStale = 227,
    /// What others did in a joint directory is shown before all members have it, if one did something after it.
    JointBeforeReplicated = 228,
    /// Who changes a name in a joint directory does not wait for what becomes of it.
    JointUnawaited = 229,
    /// What was learnt of names in a joint directory is believed later.
    JointNamesKept = 230,
    /// A name that was given in a joint directory leads there for good.
    GivenForGood = 231,
    /// What a joint operation was done to is shown to other threads before it is known whether that was taken.
    UntakenShown = 232,
    /// What somebody else has done already counts as done by who does it jointly.
    JointDoneAlready = 233,
    /// A client that has a directory jointly is given it alone while what it did is on its way.
    JointTurnedOver = 234,
    /// The sole use of a file's locks is given where others have locks on it.
    SoleBesideOthers = 343,
    /// What a client granted itself is not read when the sole use comes back.
    SoleTableUnread = 344,
    /// A client in the middle of granting itself a lock is not waited for.
    SoleUnwaited = 345,
    /// A client whose sole use comes back is not told.
    SoleWordKept = 346,
    /// A new head is not told of the sole use of locks.
    SolesUnreported = 347,
    /// Whether a lock bars one is answered although the file's locks are left to another client.
    TestBesideSole = 348,
    /// A head that was started anew does not wait for clients that were left locks to before.
    SoleOfBeforeUnheard = 349,
    /// A client grants itself locks where its leases do not count any more.
    SoleOutOfTime = 350,
    /// A client grants itself locks of a file while it has not noted yet what the head has answered.
    SoleWhileAsked = 351,
    /// A lock for which its client was to wait is granted after that has given it up.
    AwaitedGrantedLate = 352,
    /// A name that was found to lead to what has gone is not asked for again.
    FoundGoneKept = 235,
    /// A name that was given in a joint directory leads there until who takes it away has been told that it is done.
    GivenTillTold = 236,
    /// What is closed is looked for in the table when the list of what is to be told is let go.
    UntoldUnlocked = 237,
    /// What is said to be closed is not looked for again when an inode is opened.
    ClosesOvertaken = 238,
    /// What fewer members hold than the volume asks for is acknowledged.
    MinReplicasIgnored = 98,
    /// A member whose process was started again has lost its place.
    RestartIsLoss = 99,
    /// Who comes back keeps what it holds beyond the agreed stream.
    ReturnUncut = 104,
    /// A new head is not told which file locks clients hold.
    LocksUnreported = 321,
    /// The file locks of a client that has ended stay.
    LocksOfEndedKept = 322,
    /// A node that is head no more goes on counting the file locks that it gave out.
    LocksOfPastHead = 323,
    /// A directory that is opened is not pinned.
    DirectoryUnpinned = 324,
    /// Of a file lock that is made a read lock nobody is told, and it stays one to write.
    DowngradeIgnored = 325,
    /// Who was expelled again and again attaches at once.
    ExpelledFree = 254,
    /// What a kernel is said to keep is believed of any client.
    KeptOfAnyone = 255,
    /// What a node says that joins is not heard where the view with it is not known yet.
    JoinUnheard = 250,
    /// What moves to another directory keeps the reach that it had.
    ReachForgotten = 256,
    /// What is in a directory stays where it is when the directory lets in others.
    SearchForgotten = 257,
    /// A client says whom directories let come.
    PlaceAllowed = 281,
    /// What was in a small file that is gone stays in the arena.
    FreedUncleared = 280,
    /// A file is placed while others hold leases on it.
    PlaceUnrecalled = 259,
    /// Inodes that an operation asked for are forgotten for others that it needs.
    NeededForgotten = 245,
    /// The row of an expelled client goes with its log, and with it what its process has open, for a restart.
    PastOfExpelledForgotten = 244,
    /// A head that could not keep a question until it was ready does not say so.
    MissedUntold = 243,
    /// A file without a name that went with its session before it was judged is told as a refusal.
    NamelessOfPast = 242,
    /// In a sticky directory anybody who may write to it removes.
    StickyIgnored = 203,
    /// What is made in a set-group-ID directory gets the group of who makes it.
    GroupOfMaker = 204,
    /// A list whose mask bars it lets a named user all the same.
    MaskIgnored = 205,
    /// A file is opened for writing by who may read it and no more.
    OpenUnchecked = 206,
    /// A message that is not packed overtakes those that are being packed.
    PackedOvertaken = 217,
    /// A message is delivered before one that is still being unpacked.
    UnpackedOvertakes = 218,
    /// What waited to be packed or unpacked outlives its link.
    PackedOutlives = 285,
    /// A chunk that came packed is passed on in place of another one of its sequence.
    StalePassedOn = 286,
    /// Writes are taken out of a chunk whose first byte alone is written again.
    PartlyCovered = 221,
    /// A write is taken out of a chunk although it alone clears the set-id bits.
    SetidCoalesced = 284,
    /// Writes to what loses a name in a chunk are taken out although it lives on.
    UnlinkedCoalesced = 222,
    /// Writes are taken out of a chunk although something reads them before they are overwritten.
    UseCoalesced = 287,
    /// What is taken out of a chunk is no operation of it any more.
    CoalescedUncounted = 288,
    /// A packed message may claim to hold more than so few bytes can.
    BombTaken = 282,
    /// What was unpacked is not compared with its checksum.
    PackedSumIgnored = 283,
    /// The coordinator lets anybody with a certificate decide what becomes of a volume.
    RoleUnchecked = 260,
    /// Nobody asks whether a node has the certificate of the node that it says it is.
    NodeOfCertificateUnchecked = 261,
    /// Revoked certificates are believed.
    RevokedBelieved = 262,
    /// Certificates of other clusters of the same authority are believed.
    ClusterUnchecked = 263,
    /// Who dials takes anybody with a certificate for whom it means.
    WhomUnchecked = 264,
    /// A node takes chunks from any node.
    ChunkOfAnyone = 265,
    /// The blocks that were set aside for a client that has ended stay set aside.
    RoomUnsummed = 340,
    /// Chunks that were kept in memory until they were applied count for ever.
    RecentMiscounted = 341,
    /// The slot of a lease that came back is free twice.
    SlotFreedTwice = 342,
    /// A read of a block device joins one under way that began before the last write.
    StaleReadJoined = 400,
    /// What a read brings is kept though something newer was written meanwhile.
    StaleReadKept = 401,
    /// A page of the block cache is written back while it is being written back.
    PageWrittenTwice = 402,
    /// A flush of a block device leaves what is dirty in the cache.
    FlushForgetsDirty = 403,
    /// A flush goes down while bytes that it owes are still under way.
    FlushOvertakes = 404,
    /// What was trimmed stays dirty in the block cache, and is written afterwards.
    TrimLeavesDirty = 405,
    /// A flush of a block device does not wait for what took the place of dirty bytes that it owes.
    SupersededForgotten = 406,
    /// An object of a pool reads as it was before, where a newer version may lie in stores that are silent.
    OldVersionBelieved = 407,
    /// Bytes of a shard are not compared with their checksums.
    ShardUnverified = 408,
    /// A write to a pool is answered when one store has its part.
    WriteWithoutQuorum = 409,
    /// A repair removes what is old or misplaced before enough of the new is there.
    CleanedTooEarly = 410,
    /// What a read of a block device brings is kept though a write-back ended meanwhile.
    WrittenBackUnnoticed = 411,
    /// A reader of a spread lock looks whether he is in before he counts himself.
    CountedLate = 360,
    /// A writer does not wait for the readers of a spread lock.
    NotDrained = 361,
    /// Who has an inode locked waits for a lane, whose holder waits for the inode.
    LaneAwaited = 362,
    /// Two ranges of a file overlap only if the one begins in the other.
    RangesByStart = 363,
    /// A write of several entries gives up its place in the queue for its range behind the first of them.
    TicketLeftEarly = 364,
    /// Bytes of an arena that were copied with nothing locked count whatever was written meanwhile.
    CopyUnchecked = 365,
    /// Such a copy counts if the file's bytes lie where they did, though they may have been somewhere else in between.
    CopyComesBack = 366,
    /// A payload is put into a lane without regard for the pad that the entry needs before it.
    PadForgotten = 367,
    /// An append is committed at the size that the file had before its bytes were copied.
    SizeOfBefore = 368,
    /// The checksum of a block is written, and its write-back never started.
    SumNotFlushed = 380,
    /// A block of which a part is written keeps the checksum of before.
    PartlyWrittenUnsummed = 381,
    /// A rotten block of which a part is written gets the checksum of what it holds.
    RotBlessed = 382,
    /// Blocks that are half written by a crash are compared with their checksums when the stream is replayed.
    ReplayCompared = 383,
    /// A copy of a rotten block gets the checksum of what it holds.
    CopiedRotBlessed = 384,
    /// A block that another file gave up is compared with its checksum before it is written for the first time.
    FreshCompared = 385,
    /// A node that joins is sent blocks that are not what their checksums say.
    RotSent = 386,
    /// A read of content is answered with a block that is not what its checksum says.
    RotServed = 387,
    /// What another member sends for a rotten block is written without being compared with the checksum.
    HealUnproved = 388,
    /// A block counts as repaired without being read again.
    HealUnread = 389,
    /// A scrub leaves out the last block of each run.
    ScrubCutsShort = 390,
    /// Copies that hostd may have half made are made again as if it had not begun.
    HostedCompared = 391,
    /// What the first member sends for a rotten block is taken although no checksum says that it is right.
    HealAtOnce = 392,
    /// A rotten block counts as lost when members that were asked for it say nothing.
    LostWhenSilent = 393,
    /// Copies that hostd was never asked for are made as if it had made some of them.
    UnaskedAgain = 394,
    /// What the ring holds is brought in anew, after it was taken back, as if no copy of it had been made before.
    TakenBackCompared = 395,
    /// A small write to a pool is answered when one store has its patch.
    PatchWithoutQuorum = 412,
    /// What lies on an object of a pool is read oldest first.
    PatchOrder = 413,
    /// A patch that lies on a version of an object that is lost is read over another one.
    PatchOfAnother = 414,
    /// Nobody asks whether a patch between two others is missing.
    PatchNotMissed = 415,
    /// After a write of a whole object that failed a patch is laid over what was there before.
    FailedForgotten = 416,
    /// A writer numbers its versions after those that it sees, whatever one before it may have left where nobody answers.
    EpochNotCounted = 420,
    /// A small write is laid over what was seen of an object, though some stores were silent.
    LaidOverUnseen = 421,
    /// A move of ublk that was cut short counts as all of it.
    MoveCutShort = 422,
    /// A queue of ublk looks for what was completed, and only then says that it must be woken.
    BellTooLate = 423,
    /// Who has waited for a lane waits for it once more when he copies before he locks.
    OwnLaneAwaited = 430,
    /// A read begins anew each time that others have written meanwhile.
    ReadDisturbed = 431,
    /// An inode number with which nothing was made is used no more.
    NumberWasted = 432,
    /// A lock that may be free in a moment is asked for again and again while others leave.
    PutOffAgain = 433,
    /// What chunks say of their clients counts although they are cut.
    CutCounts = 434,
    /// A lease that was given back, which waits for room at the head, goes although it was reported as held meanwhile.
    ReturnOutlives = 440,
    /// A lease on its way back waits until the log of its client is found empty.
    ReadUntilEmpty = 442,
    /// All leases on their way back are looked at in one turn.
    RecallsAtOnce = 443,
    /// What a client that ends had open without a name is freed in one turn.
    ReapsAtOnce = 444,
    /// What a client has closed is told when a lease goes, though what it did before is not read yet.
    ClosedUnread = 441,
    /// What a client has closed is told only when its log is read to its end, where it never is.
    ClosedUntold = 445,
    /// What cannot be freed before something is published is not freed.
    ReapRefused = 446,
    /// What came back with the sole use of a file's locks is told once, whether the head hears it or not.
    ReturnToldOnce = 447,
    /// Who may be in the chain already is not waited for any more, when it asks again.
    PromisedUnawaited = 448,
    /// What is refused because of what a name was guessed to lead to is not looked at again.
    GuessBelieved = 449,
    /// What came of a view that was not known yet, and found no room, is not said again.
    EarlyLost = 450,
    /// Work that copies for a job that is given up, or is needed at once, is not waited for.
    CopiesOutlive = 451,
    /// A root is flipped while work copies what it leads to.
    PublishedUncopied = 452,
    /// Who compares the checksums of what came beside the thread that decides says that they are right.
    VerifiedUnseen = 453,
    /// Entries that were found right as those of one log are taken for those of another one.
    VerifiedOfOther = 454,
    /// A member that has what it cannot acknowledge yet says nothing until it can.
    NeverAtWork = 455,
    /// A member that says that it is at work is never reported, whatever becomes of that.
    AtWorkForEver = 456,
    /// What a head says that was replaced while it hung is believed of names in a joint directory.
    JointOutOfTime = 457,
    /// The end of one piece of work that puts chunks into the ring is taken for that of the oldest one.
    KeptOutOfOrder = 458,
    /// Of clients that want something at the same time the one with the lowest number is always first.
    LowestFirst = 459,
    /// An fsync for what was left in the log for the next look counts as one for what is not there.
    LeftTakenForMissing = 460,
    /// A node that joins takes over blocks by their checksums, whatever bytes they hold.
    TakenOverRotten = 461,
    /// A node that joins takes over what it had, whatever it should be.
    TakenOverUnseen = 462,
    /// The end of a snapshot does not wait for what the node lacks of what it was offered.
    OfferUnawaited = 463,
    /// A file that shares blocks is cloned from one of which they are not there yet.
    CloneUnawaited = 464,
    /// What is sent of a file because the node lacks it leaves the file changed just now.
    WantedLeavesTimes = 465,
    /// A node that joins takes over blocks of a file that was changed by their checksums alone.
    DoubtedTaken = 466,
    /// Pages that only a snapshot has are given to others.
    SnapshotPagesReused = 467,
    /// A block that a snapshot has is overwritten.
    SnapshotInPlace = 468,
    /// A block that only a snapshot has is given to others.
    SnapshotBlocksFreed = 469,
    /// What a snapshot that is given up shares with the one before is free.
    SnapshotBeforeForgotten = 470,
    /// What an operation that is not published reads of a snapshot may be overwritten when that is gone.
    SnapshotReadDropped = 471,
    /// Inodes of a snapshot are shown to whoever names them.
    SnapshotUnproved = 472,
    /// What a snapshot has is left out because it is overwritten behind it.
    SnapshotCoalesced = 473,
    /// The root of an image is written over that of the state it began with.
    ImageOverRoot = 474,
    /// A node that joins goes on from a state that is not sent to it as it was.
    ImageUnfrozen = 475,
    /// A scrub does not read what only snapshots have.
    PastUnscrubbed = 476,
    /// A snapshot is given up while what is sealed has dropped pages of it.
    SnapshotSealedDropped = 477,
    /// Limits that were set just before a snapshot are not in it.
    SnapshotAccountsOld = 478,
    /// Clients go on with blocks that a snapshot has as if they were changed in place.
    SnapshotUntold = 479,
    /// A block that a clone brings back from a snapshot counts as one that was never gone: those made meanwhile have it as well.
    SnapshotLivesJoined = 481,
    /// A block that a clone has brought back from a snapshot is written to in place: the snapshot shows what the file shows.
    SnapshotLifeForgotten = 482,
    /// Content of a snapshot is cloned for whom nobody has let read it.
    SnapshotCloneUnjudged = 483,
    /// A block that a clone has brought back is given to others when the snapshot goes that it came from.
    CloneGivenAway = 484,
    /// A clone from a snapshot has what the file holds by now.
    CloneOfNow = 485,
    /// What a file shares with others counts as what it had before.
    DifferenceShared = 486,
    /// While a piece of a snapshot is made what comes after the snapshot may leave the ring; and so may what a node lacks that has one.
    RestReleased = 487,
    /// What waited for a node that had everything, and begins anew, goes on waiting when it is not waited for.
    FollowerAwaited = 488,
    /// Nothing is acknowledged without a node that joins, from when it begins to be sent what it has missed.
    CatchUpAwaited = 489,
    /// What lies elsewhere than in the state of a node that comes back counts as what it has.
    SinceMoved = 498,
    /// So does what was written since.
    SinceWritten = 499,
    /// A node that went on by itself, in an epoch that came to nothing, counts as one that has a state of the stream.
    SinceOfOthers = 500,
    /// All waits for a node that joins, however long that takes.
    JoinStalls = 501,
    /// Of content that a node may have for an image only the checksums that lie beside it are looked at.
    ImageUnread = 502,
    /// What was found to be the same is taken though something else lies there by now.
    ImageMovedOn = 503,
    /// The arenas of an image have the numbers that they have where it comes from.
    ImageArenasRenumbered = 504,
    /// What has the right checksums counts as the same.
    ImageUncompared = 505,
    /// An image ends while the node lacks some of what it was offered.
    ImageUnsettled = 506,
    /// What has not changed up to a snapshot counts as what a later state has.
    ImageBetween = 507,
    /// Where in files there is content is no part of what two nodes compare.
    ReconcileHoles = 508,
    /// Names and attributes that the head has no more stay on a node that is brought to its state.
    ReconcileKeeps = 509,
    /// Files with the same attributes count as the same, whatever was written to them.
    ReconcileStale = 510,
    /// What is put down of publications is believed though it is of what the volume was before.
    StrangeHistory = 511,
    /// Leases that a client needs together are taken back one while it waits for the other.
    TogetherApart = 512,
    /// Whoever shows the secret is the heir of a client on another node, whosever that was.
    HeirOfAnyUser = 513,
    /// A client that lives, and does not leave, has heirs.
    HeirOfTheLiving = 514,
    /// What a client that leaves had granted itself of locks stays with it.
    HeirSolesLeft = 515,
    /// An agent gives what a client of its has locked to one of another node for which nobody has asked.
    HeirUnasked = 516,
    /// An agent tells a new head of locks that a client of its has left to one of another node.
    HeirRemembered = 517,
    /// An agent tells the head that a client has no locks which seeks what others have left to it.
    SeekerReported = 518,
    /// The head is not told that what a client had locked is its heir's.
    HeirUntold = 519,
    /// A head forgets with a new view who seeks heirs.
    SeekerForgotten = 520,
    /// What came back of locks that a client has left is told after that.
    LeftComesBack = 521,
    /// An heir grants itself locks of files of which it has not asked for all that it has got.
    HeirAlone = 522,
    /// An fsync waits for what its own process has written, and for nobody else's.
    SyncOwnOnly = 523,
    /// An fsync of a directory that several use does not ask whether others' names are on every member.
    SyncJointAlone = 524,
    /// A head that was started anew takes what it has published for what all have.
    UnackedForgotten = 525,
    /// Who asks how far the state must reach is given what else it asks for, unjudged.
    ReachUnjudged = 526,
    /// Nobody is told of what others have lost of a file that it has open.
    LossBesideUntold = 527,
    /// Of what is lost with a node's place only that counts which its service had read.
    LossUnread = 528,
    /// A client that has ended is forgotten before all have what it did.
    LossOfGone = 529,
    /// A lease that was granted early says that every member has what others did.
    EarlyVouches = 541,
    /// A head ends in order before the others have what clients did that are gone.
    ClosedOwing = 542,
    /// Nobody is told that what it has seen of a file, of clients of other nodes, is lost.
    SeenUntold = 543,
    /// What lies first on a block device is written back first, whatever a flush waits for.
    FlushStarves = 530,
    /// What a task has made of an object is taken for what was computed of the one that was begun last.
    TaskOfAnother = 531,
    /// What a repair asks of stores comes in turn with what clients ask.
    RepairInTurn = 532,
    /// A repair that may go on at a rate only goes on as fast as it can.
    RepairUnpaced = 533,
    /// A read asks a store that others wait for in vain, and waits as well.
    LateAwaited = 534,
    /// As much is dirty as the cache holds, however slow the device is.
    DirtyUnbounded = 535,
    /// Zeroes over an object that was never written are not written, although a write that failed may be there.
    ZeroesUnwritten = 536,
    /// Of what was not known when an image was opened nobody asks again.
    UnknownForGood = 537,
    /// Two clients are given the same bytes of a file.
    RangeUnjudged = 545,
    /// Who has some bytes of a file reads others of it.
    RangeReadElsewhere = 546,
    /// A file that several write has the times of who comes to the head last.
    RangeTimesByOrder = 547,
    /// Bytes of a file are granted before what others wrote there is on the node of who gets them.
    RangeGrantStale = 548,
    /// Who gets a joint lease of a file again goes on with the bytes that it had under the last one.
    RangeKeptOnRecall = 549,
    /// Who has some bytes of a file writes others of it, and the head takes that.
    RangeWriteUnjudged = 550,
    /// Who syncs a file that others write as well waits for nothing that is in their logs.
    SyncSharedAlone = 552,
    /// Who has some bytes of a file is shown blocks that its own last write has moved, before that is published.
    RangeHalfPublished = 553,
    /// A head that does not know which bytes a client has believes that it has none.
    RangesUnreported = 551,
    /// What stores have answered while somebody did something else came too late.
    AnswersUnread = 538,
    /// A repair makes whole what its own process gave up, and what is on its way out.
    UndoneRepaired = 539,
    /// A repair beside another writer removes what lies below what that may take back yet.
    SweptBeside = 540,
    /// A file of which one block changed differs in all that its changed runs hold.
    DifferenceWhole = 490,
    /// Who is not the super-user is told what two snapshots have otherwise.
    DifferencesForAll = 491,
    /// Who gives a file to another is told so before the new owner's quota is asked.
    OwnerUnsettled = 492,
    /// A kernel's FORGET that comes late takes what the kernel was told of meanwhile.
    ForgetUnasked = 493,
    /// What a FORGET takes away between a look-up and its being counted is told to the kernel all the same.
    KeptUnasked = 494,
    /// What is new is used although a node is away that may know nothing of it.
    LevelUnasked = 495,
    /// What one node understands is held for what all understand.
    LevelOfAnyone = 496,
    /// The head takes what not all nodes understand.
    LevelIgnored = 497,
}

impl Bug {
    /// Every bug that can be planted, with the name that selects it and what it breaks.
    pub const ALL: &'static [(Bug, &'static str, &'static str)] = &[
        (
            Bug::NoFenceBeforeRoot,
            "no-fence-before-root",
            "the root is written without waiting for the pages and copies that it refers to",
        ),
        (
            Bug::PageNotFlushed,
            "page-not-flushed",
            "the last page of a transaction is written, and its write-back never started",
        ),
        (
            Bug::RootNotFlushed,
            "root-not-flushed",
            "the root record is written, and its write-back never started",
        ),
        (
            Bug::RootInPlace,
            "root-in-place",
            "every root record goes to slot 0, over the one that is valid",
        ),
        (
            Bug::RootBeforePages,
            "root-before-pages",
            "the root is flipped, and the pages are written afterwards",
        ),
        (
            Bug::CopiesNotFlushed,
            "copies-not-flushed",
            "data is copied to where the extents say, and its write-back never started",
        ),
        (
            Bug::ZeroesNotFlushed,
            "zeroes-not-flushed",
            "zeroes of a truncated or punched file are written, and their write-back never started",
        ),
        (
            Bug::PageReused,
            "page-reused",
            "a page of the published tree is free for use as soon as the working state drops it",
        ),
        (
            Bug::BlockReused,
            "block-reused",
            "a block of the published state is free for use as soon as the working state drops it",
        ),
        (
            Bug::ChunkNotFlushed,
            "chunk-not-flushed",
            "the body of a chunk is put into the stream ring, and its write-back never started",
        ),
        (
            Bug::NoFenceAfterChunk,
            "no-fence-after-chunk",
            "a chunk counts as persistent before the fence: fsync returns early",
        ),
        (Bug::AckUnfetched, "ack-unfetched", "fsync is answered before the log is fetched"),
        (
            Bug::ChunkUnverified,
            "chunk-unverified",
            "recovery takes a chunk of the stream ring without judging its entries",
        ),
        (Bug::EntryUnverified, "entry-unverified", "the checksum of a log entry is not compared"),
        (Bug::RootUnverified, "root-unverified", "the checksum of a root record is not compared"),
        (
            Bug::RingWrap,
            "ring-wrap",
            "recovery does not look for the next chunk at the beginning of the stream ring",
        ),
        (
            Bug::RingRecordInPlace,
            "ring-record-in-place",
            "the record of the oldest chunk is written over the valid one",
        ),
        (
            Bug::RootAhead,
            "root-ahead",
            "the root record says that one chunk more is published than is",
        ),
        (
            Bug::ReplayForgotten,
            "replay-forgotten",
            "a node that starts forgets what its stream ring holds beyond the published state",
        ),
        (Bug::OldRootWins, "old-root-wins", "of two valid root records the older is taken"),
        (
            Bug::ChunkPartlyPublished,
            "chunk-partly-published",
            "a chunk of the stream is published when only a part of it is applied",
        ),
        (Bug::LogsDropped, "logs-dropped", "a node that starts drops the logs of its clients"),
        (
            Bug::RowNotFlushed,
            "row-not-flushed",
            "a client is written into the table, and the write-back never started",
        ),
        (
            Bug::SharedFreed,
            "shared-freed",
            "a block that several files share is free as soon as one of them gives it up",
        ),
        (
            Bug::SharedInPlace,
            "shared-in-place",
            "a block that several files share is overwritten in place",
        ),
        (
            Bug::ReadOverwritten,
            "read-overwritten",
            "a block that an unpublished operation reads is overwritten before that is published",
        ),
        (
            Bug::HeldNotFlushed,
            "held-not-flushed",
            "what a client holds is noted, and its write-back never started",
        ),
        (Bug::EarlyAck, "early-ack", "fsync is acknowledged before every member has the chunk"),
        (
            Bug::GrantBeforeReplicated,
            "grant-before-replicated",
            "a lease is granted before the last changes of its inode are on every member",
        ),
        (
            Bug::GrantBeforePublished,
            "grant-before-published",
            "a request is answered before the content it describes is published here",
        ),
        (
            Bug::RecallIgnoresOperation,
            "recall-ignores-operation",
            "a recall is answered without waiting for the operation under way",
        ),
        (
            Bug::RecallSkipsLog,
            "recall-skips-log",
            "a recall is answered before the log of its client is fetched",
        ),
        (
            Bug::PermissionSkipped,
            "permission-skipped",
            "the head does not ask whether the client may",
        ),
        (
            Bug::LeaseUnchecked,
            "lease-unchecked",
            "the head does not ask whether the client holds the lease",
        ),
        (Bug::NumberUnchecked, "number-unchecked", "a client makes inodes of any number"),
        (
            Bug::FutureEpochAccepted,
            "future-epoch-accepted",
            "an entry of an epoch that has not begun is taken",
        ),
        (Bug::ReapAllowed, "reap-allowed", "a client may free inodes, which only the service does"),
        (Bug::CycleAllowed, "cycle-allowed", "a directory can be moved below itself"),
        (Bug::NotEmptyRemoved, "not-empty-removed", "a directory that has names can be removed"),
        (
            Bug::EntrySkipped,
            "entry-skipped",
            "a member skips the last of several entries of a chunk",
        ),
        (
            Bug::CaughtUpEarly,
            "caught-up-early",
            "a joining node counts as caught up when the snapshot is on its way",
        ),
        (Bug::ExpelledNotTold, "expelled-not-told", "a client that was expelled is not told"),
        (
            Bug::DeadTailDropped,
            "dead-tail-dropped",
            "what a dead client left in its log is dropped",
        ),
        (
            Bug::FencedServes,
            "fenced-serves",
            "a node without the coordinator goes on serving under its leases",
        ),
        (Bug::RetryTwice, "retry-twice", "entries sent again are carried out again"),
        (
            Bug::CoordinatorForgets,
            "coordinator-forgets",
            "the coordinator does not persist the removal of a member",
        ),
        (
            Bug::DamageIgnored,
            "damage-ignored",
            "a member takes a chunk whose entries fail their checksum",
        ),
        (Bug::BatchLimit, "batch-limit", "an entry larger than a batch is never fetched"),
        (
            Bug::BadCopiesIgnored,
            "bad-copies-ignored",
            "copies that hostd could not do are taken for done",
        ),
        (
            Bug::ReaderBesideWriter,
            "reader-beside-writer",
            "a reader is granted a lease beside a writer",
        ),
        (
            Bug::PublishedTooFar,
            "published-too-far",
            "chunks leave the ring before they are published",
        ),
        (
            Bug::EndUnheard,
            "end-unheard",
            "a client whose end was told while the head was out of reach lives on there",
        ),
        (
            Bug::SuspectedAtOnce,
            "suspected-at-once",
            "leases of a suspected member are void before it can know",
        ),
        (Bug::OldEpochAccepted, "old-epoch-accepted", "frames of an epoch that is over are taken"),
        (
            Bug::RingOverrun,
            "ring-overrun",
            "the stream ring takes a little more than it has room for",
        ),
        (
            Bug::RingPastEnd,
            "ring-past-end",
            "a chunk at the end of the ring lacks room for what ends it",
        ),
        (
            Bug::TakeOverShort,
            "take-over-short",
            "a new head does not fetch what another member has beyond it",
        ),
        (Bug::StaleRecall, "stale-recall", "the answer to any recall takes the lease back"),
        (Bug::JoinKeepsOld, "join-keeps-old", "a joining node keeps what it held before"),
        (
            Bug::ProgressOverstated,
            "progress-overstated",
            "a client of a returning member hears that all it did is on every member",
        ),
        (
            Bug::GapAcknowledged,
            "gap-acknowledged",
            "a member acknowledges a chunk that came before its predecessor",
        ),
        (
            Bug::LostNodeKept,
            "lost-node-kept",
            "a new head keeps the leases of nodes that left the chain",
        ),
        (
            Bug::ReportedTooFew,
            "reported-too-few",
            "leases on their way back are missing in the report to a new head",
        ),
        (
            Bug::RewindAhead,
            "rewind-ahead",
            "what was fetched again counts as fetched when more has settled meanwhile",
        ),
        (
            Bug::ReleaseUnnamed,
            "release-unnamed",
            "a lease that is given back takes with it what was granted since",
        ),
        (
            Bug::PromisedWiped,
            "promised-wiped",
            "a node that may be in the chain already is sent a snapshot, and wipes itself",
        ),
        (
            Bug::SnapshotPieceLost,
            "snapshot-piece-lost",
            "a joining node is not sent the content of the last file",
        ),
        (
            Bug::MovedContent,
            "moved-content",
            "a snapshot reads blocks that nothing has been copied to yet",
        ),
        (
            Bug::CloneWhileJoining,
            "clone-while-joining",
            "a snapshot goes on although a clone reads what it copies later",
        ),
        (
            Bug::SnapshotHeadless,
            "snapshot-headless",
            "a joining node takes the rest of a snapshot for all of it",
        ),
        (Bug::LateCopies, "late-copies", "a node that does not wait for hostd lets it copy on"),
        (
            Bug::UnreadyOrders,
            "unready-orders",
            "a new head puts entries into the stream before it knows how far the stream goes",
        ),
        (
            Bug::ReleaseOvertakes,
            "release-overtakes",
            "a lease that is given back is free before the entries sent before are in the stream",
        ),
        (
            Bug::ProgressForgotten,
            "progress-forgotten",
            "a new head does not look which of its own clients' entries are acknowledged already",
        ),
        (
            Bug::RefusalUntold,
            "refusal-untold",
            "a client is not told that an operation was refused",
        ),
        (
            Bug::RoomUnsought,
            "room-unsought",
            "a head whose ring is full waits for a publication to release chunks",
        ),
        (
            Bug::HalfRootKept,
            "half-root-kept",
            "half a root record stays where it is when a node starts",
        ),
        (
            Bug::NumberAgain,
            "number-again",
            "it is not written down which of the numbers handed out are used",
        ),
        (
            Bug::LapseIgnored,
            "lapse-ignored",
            "a client uses its leases although their time is over",
        ),
        (
            Bug::LapseShort,
            "lapse-short",
            "the coordinator says too short a time in which leases of a lost member may hold",
        ),
        (
            Bug::JoinKeepsLogs,
            "join-keeps-logs",
            "a node that joins anew keeps the clients of an earlier run",
        ),
        (
            Bug::HeldForgotten,
            "held-forgotten",
            "a node that starts forgets which leases its clients hold",
        ),
        (
            Bug::CaughtUpUnnamed,
            "caught-up-unnamed",
            "a node enters the chain when a process of it that is no more had caught up",
        ),
        (
            Bug::ViewReused,
            "view-reused",
            "pages of the state that a snapshot is made of are reused while it is made",
        ),
        (
            Bug::GapIsHole,
            "gap-is-hole",
            "what lies before a part of the extent list is taken for a hole",
        ),
        (
            Bug::SummedElsewhere,
            "summed-elsewhere",
            "an entry is summed from the caller's memory, which may change meanwhile",
        ),
        (
            Bug::AppendNotFenced,
            "append-not-fenced",
            "an entry is appended, and not fenced before the call returns",
        ),
        (Bug::LaneOverrun, "lane-overrun", "a client writes over log space that is not reclaimed"),
        (
            Bug::FrontierLate,
            "frontier-late",
            "readers of log bytes are not told that these are about to be written over",
        ),
        (
            Bug::FrontierIgnored,
            "frontier-ignored",
            "a read takes bytes from the log that were written over meanwhile",
        ),
        (
            Bug::SlotCollectedTwice,
            "slot-collected-twice",
            "a request slot that another thread has taken since is given back",
        ),
        (
            Bug::NotInside,
            "not-inside",
            "a client appends without saying that it is inside an operation",
        ),
        (
            Bug::LeaseNotLookedAt,
            "lease-not-looked-at",
            "a client does not look at its leases again inside an operation",
        ),
        (
            Bug::SealIgnored,
            "seal-ignored",
            "what is appended after the seal of an expelled client counts as done",
        ),
        (
            Bug::ReadUnchecked,
            "read-unchecked",
            "the lease is not looked at again when a copy is made",
        ),
        (
            Bug::OldAnswerInstalled,
            "old-answer-installed",
            "an answer about an inode is taken in though another operation or lease came since",
        ),
        (
            Bug::OldExtents,
            "old-extents",
            "extents are taken in that were asked for before an own operation moved blocks",
        ),
        (
            Bug::NameOfBefore,
            "name-of-before",
            "what a name led to is remembered under another lease than it was asked under",
        ),
        (
            Bug::ListOfBefore,
            "list-of-before",
            "a listing is remembered though the lease was lost in the middle of it",
        ),
        (
            Bug::AnswerOfBefore,
            "answer-of-before",
            "an attribute's value counts under another lease than it was asked under",
        ),
        (
            Bug::PiecesDropped,
            "pieces-dropped",
            "own bytes that an answer does not reflect yet are forgotten",
        ),
        (Bug::MovedKept, "moved-kept", "extents are kept over a change of who may read"),
        (
            Bug::CutExtentsKept,
            "cut-extents-kept",
            "extents that were asked for before a file was cut count afterwards",
        ),
        (
            Bug::SourceKept,
            "source-kept",
            "the extents of a file are kept though a copy shares its blocks now",
        ),
        (
            Bug::LongWriteIgnored,
            "long-write-ignored",
            "another thread writes in the middle of a write of several entries",
        ),
        (
            Bug::AppendGoesOn,
            "append-goes-on",
            "an append of several entries goes on where it was, though others have appended",
        ),
        (
            Bug::PinBeforeCount,
            "pin-before-count",
            "an open file is counted when it is pinned only, and a close in between unpins it",
        ),
        (
            Bug::UnlinkedClosed,
            "unlinked-closed",
            "who removes the name of a file that it has open does not say so",
        ),
        (
            Bug::RefusalsKept,
            "refusals-kept",
            "refusals of a session are counted from what a file that is open saw in an earlier one",
        ),
        (
            Bug::JudgementUnawaited,
            "judgement-unawaited",
            "a write to which no space was promised has returned before it is judged",
        ),
        (
            Bug::LossUntold,
            "loss-untold",
            "fsync does not tell that operations were lost with a session",
        ),
        (
            Bug::LookedUpOld,
            "looked-up-old",
            "the attributes that come with a name count though the client has changed the inode since",
        ),
        (
            Bug::PinForgotten,
            "pin-forgotten",
            "what was opened in an earlier session is not made known in the next",
        ),
        (
            Bug::PagesByTime,
            "pages-by-time",
            "what the mount's pages are worth is told by the time of modification, which programs set back",
        ),
        (
            Bug::DropUnsent,
            "drop-unsent",
            "the mount does not tell the kernel to drop pages that are older than the answer",
        ),
        (
            Bug::DropAfterAnswer,
            "drop-after-answer",
            "the mount answers, and the kernel's older pages go afterwards",
        ),
        (
            Bug::DropUnawaited,
            "drop-unawaited",
            "a request is answered while pages are dropped for another",
        ),
        (
            Bug::OwnWriteTrusted,
            "own-write-trusted",
            "what a mount's kernel writes counts as being in its pages",
        ),
        (
            Bug::SizeUnstored,
            "size-unstored",
            "pages are dropped before the kernel knows how long the file is",
        ),
        (
            Bug::OpenKeepsPages,
            "open-keeps-pages",
            "pages are kept over an open though the file has changed",
        ),
        (
            Bug::AttrsOverPages,
            "attributes-over-pages",
            "attributes are kept though the pages are older",
        ),
        (
            Bug::NamesUnawaited,
            "names-unawaited",
            "a directory's attributes are told while names count that may be wrong",
        ),
        (
            Bug::AbsentKept,
            "absent-kept",
            "that a name does not exist is kept though the file system does not say so",
        ),
        (
            Bug::NamesUnchecked,
            "names-unchecked",
            "names are kept by a kernel that does not look at their directory",
        ),
        (
            Bug::KeptUncounted,
            "kept-uncounted",
            "attributes are kept of an inode that is not counted yet as known",
        ),
        (
            Bug::UnknownSkipped,
            "unknown-skipped",
            "a kernel that is about to know an inode is told once to drop its attributes",
        ),
        (
            Bug::CutTold,
            "cut-told",
            "a file that was cut is told as it is, with pages and a size that stay",
        ),
        (Bug::ReadUnnoted, "read-unnoted", "what the kernel reads in is not noted"),
        (
            Bug::CutAsked,
            "cut-asked",
            "attributes that were asked for before a write are taken for those of a file that was cut",
        ),
        (
            Bug::MostUnsettled,
            "most-unsettled",
            "the largest size that the kernel may think of is not forgotten when it changes the file",
        ),
        (
            Bug::OwnWritesUnseen,
            "own-writes-unseen",
            "a member answers a client although operations of that client are in its ring only",
        ),
        (
            Bug::BrokenLogKept,
            "broken-log-kept",
            "a log with an entry that never gets whole is waited for",
        ),
        (
            Bug::ClosedEarly,
            "closed-early",
            "a node that ends in order tells its clients before every member has what they did",
        ),
        (
            Bug::RoomUnkept,
            "room-unkept",
            "space that is promised to the writes of one client is given to another",
        ),
        (
            Bug::ClosedUnheard,
            "closed-unheard",
            "what a client has closed is not looked for when its lease is taken back",
        ),
        (
            Bug::MadeStaysPinned,
            "made-stays-pinned",
            "who makes a directory or a link counts as having it open for as long as he lives",
        ),
        (
            Bug::UnpinLost,
            "unpin-lost",
            "what an agent reports after its link was lost is added to what its client was known to have open",
        ),
        (
            Bug::CloseNotRepeated,
            "close-not-repeated",
            "what was closed is not told again when the operations before it are",
        ),
        (
            Bug::UnpinTaken,
            "unpin-taken",
            "a service that is killed with a request to close something forgets it",
        ),
        (
            Bug::RecallBetween,
            "recall-between-grants",
            "a recall comes behind the first of the grants that are held for its client, before the others",
        ),
        (
            Bug::GapRecalled,
            "gap-recalled",
            "a lease goes back while what was done under it lies behind an entry that is still to be written",
        ),
        (
            Bug::OpeningCounts,
            "opening-counts",
            "who changes a file without a name relies on another thread that is opening it",
        ),
        (
            Bug::PastForgotten,
            "past-forgotten",
            "a node forgets what a session had open when that ends, although its process goes on",
        ),
        (
            Bug::PinsOfLostFreed,
            "pins-of-lost-freed",
            "what has no name is freed although a process of a node that was lost has it open, and comes back",
        ),
        (
            Bug::TakeOverFrees,
            "take-over-frees",
            "a new head frees what has no name and is open on a node that was lost before",
        ),
        (
            Bug::GroundsUnchecked,
            "grounds-unchecked",
            "a file without a name is made by what its directory was before the lease on that went back",
        ),
        (
            Bug::ReservedUnsent,
            "reserved-unsent",
            "a node that joins is not told of reserved blocks, and has more room than the others",
        ),
        (
            Bug::ExistenceByValue,
            "existence-by-value",
            "whether an attribute exists is asked by its value, which who may change it may not be allowed to read",
        ),
        (
            Bug::CapabilityHidden,
            "capability-hidden",
            "who may write to a file and not read it is not told that it has no capabilities",
        ),
        (
            Bug::ExchangedUnasked,
            "exchanged-unasked",
            "a directory that comes into another by an exchange is not asked whether it may be written",
        ),
        (
            Bug::ReadRightForgotten,
            "read-right-forgotten",
            "that somebody was allowed to read a file when he opened it is forgotten when its mode changes",
        ),
        (
            Bug::OwnerTrusted,
            "owner-trusted",
            "who owns a file is not noted as one who may write to it when he opens it, and then it is another's",
        ),
        (
            Bug::RightsOfPastLost,
            "rights-of-past-lost",
            "what a process was allowed when it opened a file is forgotten when its session ends",
        ),
        (
            Bug::NamelessUnawaited,
            "nameless-unawaited",
            "who makes a file without a name where a limit may bar it is not told",
        ),
        (
            Bug::GivenUncounted,
            "given-uncounted",
            "a limit of inodes is not asked for when an inode gets another owner",
        ),
        (
            Bug::RefusedBetween,
            "refused-between",
            "what was refused while an allocation waited for its own verdict is never told",
        ),
        (
            Bug::ListApart,
            "list-apart",
            "extents are asked for where they are missing, which forgets those that are known and do not touch them",
        ),
        (
            Bug::PartLost,
            "part-lost",
            "of a value that does not fit one reply the parts behind the second are left out",
        ),
        (
            Bug::TruncatedUnasked,
            "truncated-unasked",
            "who cuts a file is asked whether it may before it has the lease, and not then",
        ),
        (
            Bug::NamedBefore,
            "named-before",
            "what a member has named in an earlier epoch counts in its next report",
        ),
        (
            Bug::JoinUnheard,
            "join-unheard",
            "what a node says that joins is not heard where the view with it is not known yet",
        ),
        (
            Bug::EndedSetidTrusted,
            "ended-setid-trusted",
            "set-id bits are taken for ended by an operation that may be refused",
        ),
        (Bug::LinksUncounted, "links-uncounted", "further names of a file count in no quota"),
        (Bug::AttributesUncounted, "attributes-uncounted", "extended attributes count in no quota"),
        (
            Bug::NumbersOfAnother,
            "numbers-of-another",
            "a head hands out inode numbers that an earlier one may have handed out",
        ),
        (
            Bug::RefusedIsThere,
            "refused-is-there",
            "a directory is not empty by what a limit bars from it",
        ),
        (
            Bug::NumbersForgotten,
            "numbers-forgotten",
            "a node that was sent a snapshot knows only the inode numbers that are in it",
        ),
        (
            Bug::ClosedReported,
            "closed-reported",
            "what a client has made and closed is reported as a fresh number while its node is behind",
        ),
        (Bug::LinkOfOthers, "link-of-others", "who may not write to a file gives it another name"),
        (
            Bug::RedeemedTwice,
            "redeemed-twice",
            "what was promised to an operation is taken from the account each time it is tried",
        ),
        (
            Bug::ReachForgotten,
            "reach-forgotten",
            "what moves to another directory stays in its arena",
        ),
        (
            Bug::SearchForgotten,
            "search-forgotten",
            "files stay in the arenas of those whom a directory above lets in no more",
        ),
        (
            Bug::FreedUncleared,
            "freed-uncleared",
            "what was in a small file that is gone stays in the arena",
        ),
        (Bug::PlaceAllowed, "place-allowed", "a client says whom directories let come"),
        (
            Bug::PlaceUnrecalled,
            "place-unrecalled",
            "blocks of a file move to another arena while clients hold leases and know where they were",
        ),
        (
            Bug::TakenDiscarded,
            "taken-discarded",
            "blocks that were free once go back to the medium although somebody has taken them since",
        ),
        (Bug::LeasesUncounted, "leases-uncounted", "a user has as many leases as it asks for"),
        (Bug::RequestsUncounted, "requests-uncounted", "a user's requests are served as they come"),
        (Bug::ExpelledFree, "expelled-free", "who was expelled again and again attaches at once"),
        (Bug::KeptOfAnyone, "kept-of-anyone", "any client may say that a kernel keeps things"),
        (Bug::EntriesUncut, "entries-uncut", "an operation is one entry, whatever it costs"),
        (Bug::RestForgotten, "rest-forgotten", "what did not fit in a turn is not taken up again"),
        (
            Bug::NeededForgotten,
            "needed-forgotten",
            "with few inodes remembered, those that one operation needs make room for each other for ever",
        ),
        (
            Bug::PastOfExpelledForgotten,
            "past-of-expelled-forgotten",
            "a restart forgets what the process of an expelled client has open",
        ),
        (
            Bug::MissedUntold,
            "missed-untold",
            "a head that had no room to keep a question until it was ready does not have it asked again",
        ),
        (
            Bug::NamelessOfPast,
            "nameless-of-past",
            "a file without a name that went with its session, before a limit was asked, is EIO",
        ),
        (
            Bug::StickyIgnored,
            "sticky-ignored",
            "in a sticky directory anybody who may write to it removes",
        ),
        (
            Bug::GroupOfMaker,
            "group-of-maker",
            "what is made in a set-group-ID directory gets the group of who makes it",
        ),
        (
            Bug::MaskIgnored,
            "mask-ignored",
            "a list whose mask bars it lets a named user all the same",
        ),
        (
            Bug::OpenUnchecked,
            "open-unchecked",
            "a file is opened for writing by who may read it and no more",
        ),
        (
            Bug::PackedOvertaken,
            "packed-overtaken",
            "a message that is not packed overtakes those that are being packed",
        ),
        (
            Bug::UnpackedOvertakes,
            "unpacked-overtakes",
            "a message is delivered before one that is still being unpacked",
        ),
        (
            Bug::PackedOutlives,
            "packed-outlives",
            "what waited to be packed or unpacked outlives its link",
        ),
        (
            Bug::StalePassedOn,
            "stale-passed-on",
            "a chunk that came packed is passed on in place of another one of its sequence",
        ),
        (
            Bug::PartlyCovered,
            "partly-covered",
            "writes are taken out of a chunk whose first byte alone is written again",
        ),
        (
            Bug::SetidCoalesced,
            "setid-coalesced",
            "a write is taken out of a chunk although it alone clears the set-id bits",
        ),
        (
            Bug::UnlinkedCoalesced,
            "unlinked-coalesced",
            "writes to what loses a name in a chunk are taken out although it lives on",
        ),
        (
            Bug::UseCoalesced,
            "use-coalesced",
            "writes are taken out of a chunk although something reads them before they are overwritten",
        ),
        (
            Bug::CoalescedUncounted,
            "coalesced-uncounted",
            "what is taken out of a chunk is no operation of it any more",
        ),
        (
            Bug::BombTaken,
            "bomb-taken",
            "a packed message may claim to hold more than so few bytes can",
        ),
        (
            Bug::PackedSumIgnored,
            "packed-sum-ignored",
            "what was unpacked is not compared with its checksum",
        ),
        (
            Bug::RoleUnchecked,
            "role-unchecked",
            "the coordinator lets anybody with a certificate decide what becomes of a volume",
        ),
        (
            Bug::NodeOfCertificateUnchecked,
            "node-of-certificate-unchecked",
            "a node may say that it is another one than its certificate says",
        ),
        (Bug::RevokedBelieved, "revoked-believed", "revoked certificates are believed"),
        (
            Bug::ClusterUnchecked,
            "cluster-unchecked",
            "certificates of other clusters of the same authority are believed",
        ),
        (
            Bug::WhomUnchecked,
            "whom-unchecked",
            "who dials takes anybody with a certificate for whom it means",
        ),
        (Bug::ChunkOfAnyone, "chunk-of-anyone", "a node takes chunks from any node"),
        (
            Bug::RoomUnsummed,
            "room-unsummed",
            "the blocks set aside for a client that has ended stay set aside",
        ),
        (
            Bug::RecentMiscounted,
            "recent-miscounted",
            "chunks that are applied count as kept in memory",
        ),
        (
            Bug::SlotFreedTwice,
            "slot-freed-twice",
            "the slot of a lease that came back is free twice",
        ),
        (Bug::LocksUnreported, "locks-unreported", "a new head is not told of file locks"),
        (
            Bug::LocksOfEndedKept,
            "locks-of-ended-kept",
            "the file locks of a client that has ended stay",
        ),
        (
            Bug::LocksOfPastHead,
            "locks-of-past-head",
            "who is head no more still tells of file locks",
        ),
        (
            Bug::DirectoryUnpinned,
            "directory-unpinned",
            "a directory that is open goes when it is removed",
        ),
        (
            Bug::DowngradeIgnored,
            "downgrade-ignored",
            "a lock to write that is made one to read stays one to write",
        ),
        (
            Bug::ReaderBesideJoint,
            "reader-beside-joint",
            "a directory is read under a lease beside those who change its names jointly",
        ),
        (
            Bug::JointChangesAll,
            "joint-changes-all",
            "under a joint lease more is changed than the names of the directory",
        ),
        (
            Bug::JointRefusalCounts,
            "joint-refusal-counts",
            "what did not fit in a joint directory counts as refused, and is told to whoever syncs",
        ),
        (
            Bug::UntakenUntold,
            "untaken-untold",
            "who changes a name in a joint directory is not told that it did not fit",
        ),
        (
            Bug::JointAnsweredStale,
            "joint-answered-stale",
            "names of a joint directory are told as this node has them, however far behind it is",
        ),
        (
            Bug::JointBeforeReplicated,
            "joint-before-replicated",
            "what others did in a joint directory is shown before all members have it, if one did something after it",
        ),
        (
            Bug::JointUnawaited,
            "joint-unawaited",
            "who changes a name in a joint directory does not wait for what becomes of it",
        ),
        (
            Bug::GivenForGood,
            "given-for-good",
            "a name that was given in a joint directory leads there for good",
        ),
        (
            Bug::UntakenShown,
            "untaken-shown",
            "what a joint operation was done to is shown before it is known whether that was taken",
        ),
        (
            Bug::JointDoneAlready,
            "joint-done-already",
            "what somebody else has done already counts as done by who does it jointly",
        ),
        (
            Bug::JointTurnedOver,
            "joint-turned-over",
            "a client that has a directory jointly is given it alone while what it did is on its way",
        ),
        (
            Bug::SoleBesideOthers,
            "sole-beside-others",
            "the sole use of a file's locks is given where others have locks on it",
        ),
        (
            Bug::SoleTableUnread,
            "sole-table-unread",
            "what a client granted itself is not read when the sole use comes back",
        ),
        (
            Bug::SoleUnwaited,
            "sole-unwaited",
            "a client in the middle of granting itself a lock is not waited for",
        ),
        (Bug::SoleWordKept, "sole-word-kept", "a client whose sole use comes back is not told"),
        (
            Bug::SolesUnreported,
            "soles-unreported",
            "a new head is not told of the sole use of locks",
        ),
        (
            Bug::TestBesideSole,
            "test-beside-sole",
            "whether a lock bars one is answered although the file's locks are left to another client",
        ),
        (
            Bug::SoleOfBeforeUnheard,
            "sole-of-before-unheard",
            "a head that was started anew does not wait for clients that were left locks to before",
        ),
        (
            Bug::SoleOutOfTime,
            "sole-out-of-time",
            "a client grants itself locks where its leases do not count any more",
        ),
        (
            Bug::SoleWhileAsked,
            "sole-while-asked",
            "a client grants itself locks of a file while it has not noted yet what the head has answered",
        ),
        (
            Bug::AwaitedGrantedLate,
            "awaited-granted-late",
            "a lock for which its client was to wait is granted after that has given it up",
        ),
        (
            Bug::GivenTillTold,
            "given-till-told",
            "a name given in a joint directory leads there until who takes it away is told that it is done",
        ),
        (
            Bug::FoundGoneKept,
            "found-gone-kept",
            "a name that was found to lead to what has gone is not asked for again",
        ),
        (
            Bug::JointNamesKept,
            "joint-names-kept",
            "what was learnt of names in a joint directory is believed later",
        ),
        (Bug::FloodFirst, "flood-first", "a log is taken whole, whoever waits beside it"),
        (
            Bug::RecentMistaken,
            "recent-mistaken",
            "a chunk that is kept until it is applied is taken for another that has its number since",
        ),
        (
            Bug::ClosedLater,
            "closed-later",
            "what a client has closed is found after it has asked to open it again",
        ),
        (
            Bug::UntoldUnlocked,
            "untold-unlocked",
            "who opens an inode again looks for what is closed while another thread has it in its hands to tell it",
        ),
        (
            Bug::ClosesOvertaken,
            "closes-overtaken",
            "what is closed is told in a slot that was looked at a moment before, and found when the inode is open again",
        ),
        (
            Bug::MisplacedLater,
            "misplaced-later",
            "what was appended elsewhere than the kernel believes is dropped from its pages after the answer",
        ),
        (
            Bug::MinReplicasIgnored,
            "min-replicas-ignored",
            "what fewer members hold than the volume asks for is acknowledged",
        ),
        (Bug::RestartIsLoss, "restart-is-loss", "who was started again has lost its place"),
        (
            Bug::ReturnUncut,
            "return-uncut",
            "who comes back keeps what it holds beyond the agreed stream",
        ),
        (
            Bug::StaleReadJoined,
            "stale-read-joined",
            "a read of a block device joins one under way that began before the last write",
        ),
        (
            Bug::StaleReadKept,
            "stale-read-kept",
            "what a read brings is kept though something newer was written meanwhile",
        ),
        (
            Bug::PageWrittenTwice,
            "page-written-twice",
            "a page of the block cache is written back while it is being written back",
        ),
        (
            Bug::FlushForgetsDirty,
            "flush-forgets-dirty",
            "a flush of a block device leaves what is dirty in the cache",
        ),
        (
            Bug::FlushOvertakes,
            "flush-overtakes",
            "a flush goes down while bytes that it owes are still under way",
        ),
        (
            Bug::TrimLeavesDirty,
            "trim-leaves-dirty",
            "what was trimmed stays dirty in the block cache, and is written afterwards",
        ),
        (
            Bug::SupersededForgotten,
            "superseded-forgotten",
            "a flush of a block device does not wait for what took the place of dirty bytes that it owes",
        ),
        (
            Bug::OldVersionBelieved,
            "old-version-believed",
            "an object of a pool reads as it was before, where a newer version may lie in stores that are silent",
        ),
        (
            Bug::ShardUnverified,
            "shard-unverified",
            "bytes of a shard are not compared with their checksums",
        ),
        (
            Bug::WriteWithoutQuorum,
            "write-without-quorum",
            "a write to a pool is answered when one store has its part",
        ),
        (
            Bug::CleanedTooEarly,
            "cleaned-too-early",
            "a repair removes what is old or misplaced before enough of the new is there",
        ),
        (
            Bug::WrittenBackUnnoticed,
            "written-back-unnoticed",
            "what a read of a block device brings is kept though a write-back ended meanwhile",
        ),
        (
            Bug::CountedLate,
            "counted-late",
            "a reader of a spread lock looks whether it is in before it counts itself",
        ),
        (Bug::NotDrained, "not-drained", "a writer does not wait for the readers of a spread lock"),
        (
            Bug::LaneAwaited,
            "lane-awaited",
            "who has an inode locked waits for a lane, whose holder waits for the inode",
        ),
        (
            Bug::TicketLeftEarly,
            "ticket-left-early",
            "a write of several entries gives up its place in the queue for its range behind the first of them",
        ),
        (
            Bug::PadForgotten,
            "pad-forgotten",
            "a payload is put into a lane without regard for the pad that the entry needs before it",
        ),
        (
            Bug::RangesByStart,
            "ranges-by-start",
            "two ranges of a file overlap only if the one begins in the other",
        ),
        (
            Bug::CopyUnchecked,
            "copy-unchecked",
            "bytes of an arena that were copied with nothing locked count whatever was written meanwhile",
        ),
        (
            Bug::CopyComesBack,
            "copy-comes-back",
            "such a copy counts if the file's bytes lie where they did, though they may have been elsewhere in between",
        ),
        (
            Bug::SizeOfBefore,
            "size-of-before",
            "an append is committed at the size that the file had before its bytes were copied",
        ),
        (
            Bug::SumNotFlushed,
            "sum-not-flushed",
            "the checksum of a block is written, and its write-back never started",
        ),
        (
            Bug::PartlyWrittenUnsummed,
            "partly-written-unsummed",
            "a block of which a part is written keeps the checksum of before",
        ),
        (
            Bug::RotBlessed,
            "rot-blessed",
            "a rotten block of which a part is written gets the checksum of what it holds",
        ),
        (
            Bug::ReplayCompared,
            "replay-compared",
            "blocks that are half written by a crash are compared with their checksums when the stream is replayed",
        ),
        (
            Bug::CopiedRotBlessed,
            "copied-rot-blessed",
            "a copy of a rotten block gets the checksum of what it holds",
        ),
        (
            Bug::FreshCompared,
            "fresh-compared",
            "a block that another file gave up is compared with its checksum before it is written for the first time",
        ),
        (
            Bug::RotSent,
            "rot-sent",
            "a node that joins is sent blocks that are not what their checksums say",
        ),
        (
            Bug::RotServed,
            "rot-served",
            "a read of content is answered with a block that is not what its checksum says",
        ),
        (
            Bug::HealUnproved,
            "heal-unproved",
            "what another member sends for a rotten block is written without being compared with the checksum",
        ),
        (Bug::HealUnread, "heal-unread", "a block counts as repaired without being read again"),
        (Bug::ScrubCutsShort, "scrub-cuts-short", "a scrub leaves out the last block of each run"),
        (
            Bug::HostedCompared,
            "hosted-compared",
            "copies that hostd may have half made are made again as if it had not begun",
        ),
        (
            Bug::HealAtOnce,
            "heal-at-once",
            "what the first member sends for a rotten block is taken although no checksum says that it is right",
        ),
        (
            Bug::LostWhenSilent,
            "lost-when-silent",
            "a rotten block counts as lost when members that were asked for it say nothing",
        ),
        (
            Bug::UnaskedAgain,
            "unasked-again",
            "copies that hostd was never asked for are made as if it had made some of them",
        ),
        (
            Bug::TakenBackCompared,
            "taken-back-compared",
            "what the ring holds is brought in anew, after it was taken back, as if no copy of it had been made before",
        ),
        (
            Bug::PatchWithoutQuorum,
            "patch-without-quorum",
            "a small write to a pool is answered when one store has its patch",
        ),
        (Bug::PatchOrder, "patch-order", "what lies on an object of a pool is read oldest first"),
        (
            Bug::PatchOfAnother,
            "patch-of-another",
            "a patch that lies on a version of an object that is lost is read over another one",
        ),
        (
            Bug::PatchNotMissed,
            "patch-not-missed",
            "nobody asks whether a patch between two others is missing",
        ),
        (
            Bug::FailedForgotten,
            "failed-forgotten",
            "after a write of a whole object that failed a patch is laid over what was there before",
        ),
        (
            Bug::EpochNotCounted,
            "epoch-not-counted",
            "a writer numbers its versions after those that it sees, whatever one before it left where nobody answers",
        ),
        (
            Bug::LaidOverUnseen,
            "laid-over-unseen",
            "a small write is laid over what was seen of an object, though some stores were silent",
        ),
        (
            Bug::MoveCutShort,
            "move-cut-short",
            "a move of ublk that was cut short counts as all of it",
        ),
        (
            Bug::BellTooLate,
            "bell-too-late",
            "a queue of ublk looks for what was completed, and only then says that it must be woken",
        ),
        (
            Bug::OwnLaneAwaited,
            "own-lane-awaited",
            "who has waited for a lane waits for it once more when he copies before he locks",
        ),
        (
            Bug::ReadDisturbed,
            "read-disturbed",
            "a read begins anew each time that others have written meanwhile",
        ),
        (
            Bug::NumberWasted,
            "number-wasted",
            "an inode number with which nothing was made is used no more",
        ),
        (
            Bug::PutOffAgain,
            "put-off-again",
            "a lock that may be free in a moment is asked for again and again while others leave",
        ),
        (
            Bug::CutCounts,
            "cut-counts",
            "what chunks say of their clients counts although they are cut",
        ),
        (
            Bug::ReturnOutlives,
            "return-outlives",
            "a lease that was given back, which waits for room at the head, goes although it was reported as held",
        ),
        (
            Bug::ReadUntilEmpty,
            "read-until-empty",
            "a lease on its way back waits until the log of its client is found empty",
        ),
        (
            Bug::RecallsAtOnce,
            "recalls-at-once",
            "all leases on their way back are looked at in one turn",
        ),
        (
            Bug::ReapsAtOnce,
            "reaps-at-once",
            "what a client that ends had open without a name is freed in one turn",
        ),
        (
            Bug::ClosedUnread,
            "closed-unread",
            "what a client has closed is told when a lease goes, though what it did before is not read yet",
        ),
        (
            Bug::ClosedUntold,
            "closed-untold",
            "what a client has closed is told only when its log is read to its end, where it never is",
        ),
        (
            Bug::ReapRefused,
            "reap-refused",
            "what cannot be freed before something is published is not freed",
        ),
        (
            Bug::ReturnToldOnce,
            "return-told-once",
            "what came back with the sole use of a file's locks is told once, whether the head hears it or not",
        ),
        (
            Bug::PromisedUnawaited,
            "promised-unawaited",
            "who may be in the chain already is not waited for any more, when it asks again",
        ),
        (
            Bug::GuessBelieved,
            "guess-believed",
            "what is refused because of what a name was guessed to lead to is not looked at again",
        ),
        (
            Bug::EarlyLost,
            "early-lost",
            "what came of a view that was not known yet, and found no room, is not said again",
        ),
        (
            Bug::KeptUnfenced,
            "kept-unfenced",
            "work that puts a chunk into the ring ends without a fence of its own",
        ),
        (
            Bug::CopiesUnfenced,
            "copies-unfenced",
            "work that copies what is published ends without a fence of its own",
        ),
        (
            Bug::CopiesOutlive,
            "copies-outlive",
            "work that copies for a job that ends is not waited for",
        ),
        (
            Bug::PublishedUncopied,
            "published-uncopied",
            "a root is flipped while work copies what it leads to",
        ),
        (
            Bug::VerifiedUnseen,
            "verified-unseen",
            "who compares checksums beside the thread that decides says that they are right",
        ),
        (
            Bug::VerifiedOfOther,
            "verified-of-other",
            "entries that are right as those of one log are taken for those of another one",
        ),
        (
            Bug::NeverAtWork,
            "never-at-work",
            "a member that has what it cannot acknowledge yet says nothing until it can",
        ),
        (
            Bug::AtWorkForEver,
            "at-work-for-ever",
            "a member that says that it is at work is never reported",
        ),
        (
            Bug::JointOutOfTime,
            "joint-out-of-time",
            "what a head says that was replaced while it hung is believed of names in a joint directory",
        ),
        (
            Bug::KeptOutOfOrder,
            "kept-out-of-order",
            "the end of a piece that puts chunks into the ring is taken for that of the oldest one",
        ),
        (
            Bug::LowestFirst,
            "lowest-first",
            "of clients that want something at the same time the one with the lowest number is always first",
        ),
        (
            Bug::LeftTakenForMissing,
            "left-taken-for-missing",
            "an fsync for what was left in the log for the next look counts as one for what is not there",
        ),
        (
            Bug::TakenOverRotten,
            "taken-over-rotten",
            "a node that joins takes over blocks by their checksums, whatever bytes they hold",
        ),
        (
            Bug::TakenOverUnseen,
            "taken-over-unseen",
            "a node that joins takes over what it had, whatever it should be",
        ),
        (
            Bug::OfferUnawaited,
            "offer-unawaited",
            "the end of a snapshot does not wait for what the node lacks of what it was offered",
        ),
        (
            Bug::CloneUnawaited,
            "clone-unawaited",
            "a file that shares blocks is cloned from one of which they are not there yet",
        ),
        (
            Bug::WantedLeavesTimes,
            "wanted-leaves-times",
            "what is sent of a file because the node lacks it leaves the file changed just now",
        ),
        (
            Bug::DoubtedTaken,
            "doubted-taken",
            "a node that joins takes over blocks of a file that was changed by their checksums alone",
        ),
        (Bug::KeptEarly, "kept-early", "a chunk that is on its way into the ring is acknowledged"),
        (Bug::PublishedUnkept, "published-unkept", "what is on its way into the ring is published"),
        (
            Bug::SettledUnkept,
            "settled-unkept",
            "a client is told that what is on its way into the ring is settled",
        ),
        (
            Bug::MadeUnkept,
            "made-unkept",
            "a number counts as made use of before what makes use of it is in the ring",
        ),
        (
            Bug::KeptReadEarly,
            "kept-read-early",
            "a chunk that is on its way into the ring is read from there",
        ),
        (
            Bug::AnsweredUnkept,
            "answered-unkept",
            "an answer shows what is on its way into the ring of the head",
        ),
        (
            Bug::ReadOutlives,
            "read-outlives",
            "what was read of a log counts although it was to be read again since",
        ),
        (
            Bug::DrainUnread,
            "drain-unread",
            "a log counts as read to its end while that is under way",
        ),
        (
            Bug::SnapshotPagesReused,
            "snapshot-pages-reused",
            "pages that only a snapshot has are given to others",
        ),
        (Bug::SnapshotInPlace, "snapshot-in-place", "a block that a snapshot has is overwritten"),
        (
            Bug::SnapshotBlocksFreed,
            "snapshot-blocks-freed",
            "a block that only a snapshot has is given to others",
        ),
        (
            Bug::SnapshotBeforeForgotten,
            "snapshot-before-forgotten",
            "what a snapshot that is given up shares with the one before is free",
        ),
        (
            Bug::SnapshotReadDropped,
            "snapshot-read-dropped",
            "what an operation that is not published reads of a snapshot may be overwritten when that is gone",
        ),
        (
            Bug::SnapshotUnproved,
            "snapshot-unproved",
            "inodes of a snapshot are shown to whoever names them",
        ),
        (
            Bug::SnapshotCoalesced,
            "snapshot-coalesced",
            "what a snapshot has is left out because it is overwritten behind it",
        ),
        (
            Bug::ImageOverRoot,
            "image-over-root",
            "the root of an image is written over that of the state it began with",
        ),
        (
            Bug::ImageUnfrozen,
            "image-unfrozen",
            "a node that joins goes on from a state that is not sent to it as it was",
        ),
        (Bug::PastUnscrubbed, "past-unscrubbed", "a scrub does not read what only snapshots have"),
        (
            Bug::SnapshotSealedDropped,
            "snapshot-sealed-dropped",
            "a snapshot is given up while what is sealed has dropped pages of it",
        ),
        (
            Bug::SnapshotAccountsOld,
            "snapshot-accounts-old",
            "limits that were set just before a snapshot are not in it",
        ),
        (
            Bug::SnapshotUntold,
            "snapshot-untold",
            "clients go on with blocks that a snapshot has as if they were changed in place",
        ),
        (
            Bug::SnapshotLivesJoined,
            "snapshot-lives-joined",
            "a block that a clone brings back from a snapshot counts as one that was never gone: those made meanwhile have it as well",
        ),
        (
            Bug::SnapshotLifeForgotten,
            "snapshot-life-forgotten",
            "a block that a clone has brought back from a snapshot is written to in place: the snapshot shows what the file shows",
        ),
        (
            Bug::SnapshotCloneUnjudged,
            "snapshot-clone-unjudged",
            "content of a snapshot is cloned for whom nobody has let read it",
        ),
        (
            Bug::CloneGivenAway,
            "clone-given-away",
            "a block that a clone has brought back is given to others when the snapshot goes that it came from",
        ),
        (Bug::CloneOfNow, "clone-of-now", "a clone from a snapshot has what the file holds by now"),
        (
            Bug::DifferenceShared,
            "difference-shared",
            "what a file shares with others counts as what it had before",
        ),
        (
            Bug::DifferenceWhole,
            "difference-whole",
            "a file of which one block changed differs in all that its changed runs hold",
        ),
        (
            Bug::DifferencesForAll,
            "differences-for-all",
            "who is not the super-user is told what two snapshots have otherwise",
        ),
        (
            Bug::OwnerUnsettled,
            "owner-unsettled",
            "who gives a file to another is told so before the new owner's quota is asked",
        ),
        (
            Bug::ForgetUnasked,
            "forget-unasked",
            "a kernel's FORGET that comes late takes what the kernel was told of meanwhile",
        ),
        (
            Bug::KeptUnasked,
            "kept-unasked",
            "what a FORGET takes away between a look-up and its being counted is told to the kernel all the same",
        ),
        (
            Bug::LevelUnasked,
            "level-unasked",
            "the coordinator raises a volume's level while a node is away that may have an older program",
        ),
        (
            Bug::LevelOfAnyone,
            "level-of-anyone",
            "a volume has the level of its newest node, not of its oldest",
        ),
        (
            Bug::RestReleased,
            "rest-released",
            "what a node that joins has yet to be sent of the stream leaves the ring",
        ),
        (
            Bug::FollowerAwaited,
            "follower-awaited",
            "who waits for a node that begins anew is not told that it is not waited for any more",
        ),
        (
            Bug::CatchUpAwaited,
            "catch-up-awaited",
            "all waits for a node that joins while it is sent what it has missed of the stream",
        ),
        (
            Bug::SinceMoved,
            "since-moved",
            "a node that comes back is told to keep blocks where others lie by now",
        ),
        (
            Bug::SinceWritten,
            "since-written",
            "a node that comes back is told to keep blocks that were written since",
        ),
        (
            Bug::SinceOfOthers,
            "since-of-others",
            "a node that comes back with chunks which nobody else has is told to keep what they wrote",
        ),
        (
            Bug::JoinStalls,
            "join-stalls",
            "nothing is written any more when the stream ring is full, until a node that joins has everything",
        ),
        (
            Bug::ImageUnread,
            "image-unread",
            "a node that is sent an image keeps blocks that are rotten",
        ),
        (
            Bug::ImageMovedOn,
            "image-moved-on",
            "a node that is sent an image takes content from where other content has come to lie",
        ),
        (
            Bug::ImageArenasRenumbered,
            "image-arenas-renumbered",
            "who has mapped an arena finds in it what is for others",
        ),
        (
            Bug::ImageUncompared,
            "image-uncompared",
            "a node that is sent an image keeps what has the right checksums, and is not the same",
        ),
        (
            Bug::ImageUnsettled,
            "image-unsettled",
            "an image ends before the node has said what it lacks",
        ),
        (
            Bug::ImageBetween,
            "image-between",
            "a node that is sent an image takes for content of a snapshot what the file had later",
        ),
        (
            Bug::ReconcileHoles,
            "reconcile-holes",
            "a node that comes back keeps content where the head has a hole by now",
        ),
        (
            Bug::ReconcileKeeps,
            "reconcile-keeps",
            "a node that comes back keeps names and inodes that the head has no more",
        ),
        (
            Bug::ReconcileStale,
            "reconcile-stale",
            "a node that comes back keeps content that was written to since, where no attribute tells",
        ),
        (
            Bug::StrangeHistory,
            "strange-history",
            "a node takes publications of a volume that was there before for its own",
        ),
        (
            Bug::TogetherApart,
            "together-apart",
            "clients that each need several leases take them from each other for ever",
        ),
        (
            Bug::HeirOfAnyUser,
            "heir-of-any-user",
            "the secret is enough to be an heir on another node",
        ),
        (
            Bug::HeirOfTheLiving,
            "heir-of-the-living",
            "a client that goes on loses its locks to who shows its secret",
        ),
        (
            Bug::HeirSolesLeft,
            "heir-soles-left",
            "locks that a leaving client granted itself are not its heir's",
        ),
        (
            Bug::HeirUnasked,
            "heir-unasked",
            "an agent gives locks to a client of another node that did not ask",
        ),
        (
            Bug::HeirRemembered,
            "heir-remembered",
            "locks that were left to another node's client come back with a new head",
        ),
        (
            Bug::SeekerReported,
            "seeker-reported",
            "an heir loses what it just got when its link breaks",
        ),
        (
            Bug::HeirUntold,
            "heir-untold",
            "others get what a process had locked before its next life has it",
        ),
        (
            Bug::SeekerForgotten,
            "seeker-forgotten",
            "what was left to an heir is lost with a new view",
        ),
        (
            Bug::LeftComesBack,
            "left-comes-back",
            "locks that were left are the leaver's again when its link begins anew",
        ),
        (
            Bug::HeirAlone,
            "heir-alone",
            "what an heir has not asked for yet is lost when somebody else asks",
        ),
        (
            Bug::SyncOwnOnly,
            "sync-own-only",
            "what one process has written and another has synced is lost",
        ),
        (
            Bug::SyncJointAlone,
            "sync-joint-alone",
            "names that others have given in a directory used jointly are lost after its fsync",
        ),
        (
            Bug::UnackedForgotten,
            "unacked-forgotten",
            "what a head alone has is granted to others once it has been started anew",
        ),
        (Bug::ReachUnjudged, "reach-unjudged", "anybody who finds a file may read it"),
        (
            Bug::LossBesideUntold,
            "loss-beside-untold",
            "an fsync vouches for what another process has lost",
        ),
        (Bug::LossUnread, "loss-unread", "an fsync vouches for what lay in another's log unread"),
        (
            Bug::LossOfGone,
            "loss-of-gone",
            "an fsync vouches for what a process has written that has ended, and that the head alone had",
        ),
        (
            Bug::ClosedOwing,
            "closed-owing",
            "what others have seen is gone with a head that has ended in order",
        ),
        (
            Bug::SeenUntold,
            "seen-untold",
            "an fsync vouches for what was seen of another node's client, and is lost",
        ),
        (
            Bug::RangeUnjudged,
            "range-unjudged",
            "two processes have the same bytes of a file, and one's are lost",
        ),
        (
            Bug::RangeReadElsewhere,
            "range-read-elsewhere",
            "who has some bytes of a file reads old ones of another process",
        ),
        (
            Bug::RangeTimesByOrder,
            "range-times-by-order",
            "the time of a file that several write goes back",
        ),
        (
            Bug::RangeGrantStale,
            "range-grant-stale",
            "who gets bytes of a file that another process wrote reads older ones",
        ),
        (
            Bug::RangeKeptOnRecall,
            "range-kept-on-recall",
            "who had bytes of a file, and has them no more, writes them beside who has",
        ),
        (
            Bug::RangeWriteUnjudged,
            "range-write-unjudged",
            "a program writes bytes of a file that are another's",
        ),
        (
            Bug::RangeHalfPublished,
            "range-half-published",
            "who has bytes of a file beside others reads what was in a block before it was given to the file",
        ),
        (
            Bug::SyncSharedAlone,
            "sync-shared-alone",
            "an fsync returns before every member has what others wrote to other bytes of the file",
        ),
        (
            Bug::RangesUnreported,
            "ranges-unreported",
            "a new head refuses writes that were acknowledged, of bytes of a file that several use",
        ),
        (
            Bug::EarlyVouches,
            "early-vouches",
            "an fsync returns before every member has what another process of the node wrote",
        ),
        (
            Bug::FlushStarves,
            "flush-starves",
            "a flush of a block device waits behind bytes that became dirty after it",
        ),
        (
            Bug::TaskOfAnother,
            "task-of-another",
            "an object of a pool is given the parity of another",
        ),
        (
            Bug::RepairInTurn,
            "repair-in-turn",
            "clients of a pool wait for all that a repair has asked for before",
        ),
        (Bug::RepairUnpaced, "repair-unpaced", "a repair of a pool does not keep to its rate"),
        (
            Bug::DirtyUnbounded,
            "dirty-unbounded",
            "a flush of a slow block device waits for a whole cache of dirty pages",
        ),
        (Bug::AnswersUnread, "answers-unread", "what is durable in a pool is taken for late"),
        (
            Bug::UndoneRepaired,
            "undone-repaired",
            "a repair of a pool builds upon what is removed behind it",
        ),
        (
            Bug::SweptBeside,
            "swept-beside",
            "a repair of a pool removes what its writer goes back to when a write has failed",
        ),
        (
            Bug::UnknownForGood,
            "unknown-for-good",
            "what silent stores may have is not read when they are back",
        ),
        (
            Bug::ZeroesUnwritten,
            "zeroes-unwritten",
            "a write to a pool that failed comes back over zeroes that were answered",
        ),
        (
            Bug::LateAwaited,
            "late-awaited",
            "each read of a pool waits anew for a store that says nothing",
        ),
        (
            Bug::LevelIgnored,
            "level-ignored",
            "the head puts into the stream what not all nodes of the volume understand",
        ),
    ];

    /// The bug called `name`.
    #[must_use]
    pub fn named(name: &str) -> Option<Bug> {
        Self::ALL.iter().find(|bug| bug.1 == name).map(|bug| bug.0)
    }
}

#[cfg(feature = "planted")]
static CHOSEN: core::sync::atomic::AtomicU16 = core::sync::atomic::AtomicU16::new(0);

/// Plants `bug`, and takes out the one before it. For the whole process: run the variants one after the other.
#[cfg(feature = "planted")]
pub fn choose(bug: Bug) {
    CHOSEN.store(bug as u16, core::sync::atomic::Ordering::SeqCst);
}

/// Runs each test with its variant planted; the variants whose tests end well, so that they miss them. For tests that nothing
/// else runs beside.
#[cfg(all(feature = "planted", feature = "std"))]
pub fn missed(tests: &[(Bug, fn())]) -> Vec<Bug> {
    let mut missed = Vec::new();
    for (bug, test) in tests {
        choose(*bug);
        if std::panic::catch_unwind(test).is_ok() {
            missed.push(*bug);
        }
        choose(Bug::None);
    }
    missed
}

/// Whether `bug` is planted.
#[cfg(feature = "planted")]
#[inline]
#[must_use]
pub fn planted(bug: Bug) -> bool {
    CHOSEN.load(core::sync::atomic::Ordering::Relaxed) == bug as u16
}

/// Whether `bug` is planted: in a build that is shipped, never.
#[cfg(not(feature = "planted"))]
#[inline(always)]
#[must_use]
pub const fn planted(_bug: Bug) -> bool {
    false
}
