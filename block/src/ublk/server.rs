//! A device with its queues: made or taken over, and served until it is stopped.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use super::abi::{self, Info, Params, attribute, flag, state};
use super::control::{Control, Error};
use super::queue::Rules;
use super::ring::{Place, Ring};
use super::worker;
use crate::device::{Device, SECTOR, Traits};

/// Most bytes of a request.
const IO_BYTES: u32 = 512 << 10;
/// Most bytes that are trimmed, or zeroed where that costs less than writing, by one request.
const RANGE_BYTES: u32 = 1 << 30;
/// Most bytes of zeroes that are written by one request.
const ZERO_BYTES: u32 = 16 << 20;
/// How long the kernel may take until it is done with a server that died, and how often that is looked at.
/// (Where the dead server had all requests of a queue it waits until they are as old as requests may be: 30 s, rounded up.)
const DYING: Duration = Duration::from_secs(90);
const LOOK: Duration = Duration::from_millis(50);
/// How long the node of a new device may take to appear.
const APPEARING: Duration = Duration::from_secs(5);

/// How a device is to be made.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Its number; none: any.
    pub id: Option<u32>,
    /// Hardware queues, each with a thread. The kernel makes no more than it has processors.
    pub queues: u16,
    /// Requests in each.
    pub depth: u16,
    /// It outlives its server: what is behind it is still there when that is started again.
    pub lasting: bool,
    /// The pages of requests are used as they are, where kernel and device allow it.
    pub zero_copy: bool,
    /// A number by which the server knows it again.
    pub mark: u64,
}

/// What workers and whoever waits for them know together.
#[derive(Debug)]
struct Health {
    working: AtomicUsize,
    failure: Mutex<Option<String>>,
    /// Readable when all have ended, or one has failed.
    bell: OwnedFd,
}

impl Health {
    fn ended(&self, queue: u16, result: io::Result<()>) {
        let failed = result.is_err();
        if let Err(error) = result {
            let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
            failure.get_or_insert_with(|| format!("queue {queue}: {error}"));
        }
        if self.working.fetch_sub(1, Ordering::SeqCst) == 1 || failed {
            let _ = rustix::io::write(&self.bell, &1_u64.to_le_bytes());
        }
    }

    fn failure(&self) -> Option<String> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Why the disk will never start.
    fn in_vain(&self) -> Option<io::Error> {
        if let Some(why) = self.failure() {
            return Some(io::Error::other(why));
        }
        let gone = self.working.load(Ordering::SeqCst) == 0;
        gone.then(|| io::Error::other("the device was removed meanwhile"))
    }
}

/// A served device. Its workers go on until it is stopped, removed by somebody else, or the process ends: then it stays or goes as it
/// was made.
#[derive(Debug)]
pub struct Server {
    control: Control,
    info: Info,
    size: u64,
    workers: Vec<JoinHandle<()>>,
    health: Arc<Health>,
}

impl Server {
    /// Makes a device of the kernel for `device`, and serves it. Before anybody can use it `known` is told its number, so that it can be
    /// known again if this process dies in the middle; `false`: it cannot.
    ///
    /// # Errors
    /// When the kernel refuses, or it cannot be known again: then there is no device.
    pub fn add(
        mut control: Control,
        device: Arc<dyn Device>,
        config: &Config,
        known: impl FnOnce(u32) -> bool,
    ) -> Result<Self, Error> {
        let params = params(&*device)?;
        let mut flags = flag::IOCTL_ENCODE;
        let direct = flag::ZERO_COPY | flag::AUTO_BUF_REG;
        if config.zero_copy && device.file().is_some() && control.features() & direct == direct {
            flags |= direct;
        } else {
            flags |= flag::USER_COPY;
        }
        if config.lasting {
            flags |= flag::USER_RECOVERY | flag::USER_RECOVERY_REISSUE;
        }
        let wanted = Info {
            queues: config.queues,
            depth: config.depth,
            io_bytes: IO_BYTES,
            id: config.id.unwrap_or(u32::MAX),
            flags,
            mark: config.mark,
            ..Info::default()
        };
        let info = control.add(wanted)?;
        let id = info.id;
        let kept = match known(id) {
            true => Ok(()),
            false => Err(Error::Unfit(format!("/dev/ublkb{id} would not be known again"))),
        };
        let started = kept
            .and_then(|()| control.set_params(id, params))
            .and_then(|()| Self::launch(control, device, info, &params))
            .and_then(|mut server| {
                let health = Arc::clone(&server.health);
                match server.control.start(id, || health.in_vain()) {
                    Ok(()) => Ok(server),
                    Err(error) => {
                        let _ = server.control.stop(id);
                        server.join();
                        Err(error)
                    }
                }
            });
        if started.is_err() {
            // Nothing of it stays.
            let _ = Control::open().and_then(|mut control| control.delete(id));
        }
        started
    }

    /// Takes a device over whose server is gone, and goes on with it. `device` must be what was served.
    ///
    /// # Errors
    /// When there is no such device with that mark, it has a server, or `device` does not fit: then it stays as it is.
    pub fn recover(
        mut control: Control,
        device: Arc<dyn Device>,
        id: u32,
        mark: u64,
    ) -> Result<Self, Error> {
        let info = control.info(id)?.filter(|info| info.mark == mark);
        let info = info.ok_or(Error::NotThere(id))?;
        if info.flags & flag::USER_RECOVERY == 0 || info.state == state::DEAD {
            return Err(Error::Unfit(format!("/dev/ublkb{id} does not outlive its server")));
        }
        let was = control.params(id)?;
        fits(&was, &info, &*device)?;
        let deadline = Instant::now() + DYING;
        while !control.start_recovery(id)? {
            if Instant::now() > deadline {
                return Err(Error::Unfit(format!(
                    "/dev/ublkb{id} has a server (process {}), or the kernel is not done with it after {} s",
                    info.pid,
                    DYING.as_secs()
                )));
            }
            std::thread::sleep(LOOK);
        }
        let mut server = Self::launch(control, device, info, &was)?;
        let health = Arc::clone(&server.health);
        server.control.end_recovery(id, || health.in_vain())?;
        Ok(server)
    }

    /// Starts the workers, which fetch all requests.
    fn launch(
        control: Control,
        device: Arc<dyn Device>,
        info: Info,
        params: &Params,
    ) -> Result<Self, Error> {
        let path = format!("/dev/ublkc{}", info.id);
        let node = Arc::new(open(&path).map_err(|error| Error::System(path, error))?);
        let size = params.basic.sectors * SECTOR;
        let direct = info.flags & flag::AUTO_BUF_REG != 0;
        let file = match device.file().filter(|_| direct) {
            None => None,
            Some(file) => {
                let own = file.try_clone_to_owned();
                Some(Arc::new(own.map_err(|error| Error::System("the file".into(), error))?))
            }
        };
        let rules = Rules { size, traits: device.traits(), io_bytes: info.io_bytes, direct };
        let bell = eventfd(0, EventfdFlags::CLOEXEC)
            .map_err(|error| Error::System("eventfd".into(), error.into()))?;
        let health = Arc::new(Health {
            working: AtomicUsize::new(info.queues.into()),
            failure: Mutex::default(),
            bell,
        });
        let mut workers = Vec::new();
        for queue in 0..info.queues {
            let place =
                Place { device: Arc::clone(&node), queue, depth: info.depth, file: file.clone() };
            let (device, health) = (Arc::clone(&device), Arc::clone(&health));
            let work = move || {
                let result = Ring::new(place)
                    .and_then(|mut ring| worker::run(&mut ring, &*device, rules, info.depth));
                health.ended(queue, result);
            };
            let thread = std::thread::Builder::new().name(format!("ublk-{queue}")).spawn(work);
            workers.push(thread.map_err(|error| Error::System("starting a thread".into(), error))?);
        }
        Ok(Self { control, info, size, workers, health })
    }

    /// What the device is, as the kernel has it.
    pub fn info(&self) -> &Info {
        &self.info
    }

    /// Bytes of its disk.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Readable when it is no longer served: somebody removed it, or a queue failed.
    pub fn over(&self) -> BorrowedFd<'_> {
        self.health.bell.as_fd()
    }

    /// Why a queue failed, if one has.
    pub fn failure(&self) -> Option<String> {
        self.health.failure()
    }

    /// Removes the disk, when what is under way is carried out, and then the device.
    ///
    /// # Errors
    /// When the kernel refuses. That somebody else has removed it is fine.
    pub fn stop(mut self) -> Result<(), Error> {
        self.end(Control::stop)?;
        self.join();
        self.end(Control::delete)
    }

    /// Does that to the device, if it is there: when somebody else has removed it, the next one has its number at once.
    fn end(&mut self, how: fn(&mut Control, u32) -> Result<(), Error>) -> Result<(), Error> {
        let id = self.info.id;
        if self.control.info(id)?.is_none_or(|info| info.mark != self.info.mark) {
            return Ok(());
        }
        match how(&mut self.control, id) {
            Ok(()) | Err(Error::NotThere(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Waits for the workers, whose requests the kernel has given up.
    fn join(&mut self) {
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

/// Opens a character device. It may be about to appear, or not yet be closed by the server before.
fn open(path: &str) -> io::Result<File> {
    let deadline = Instant::now() + APPEARING;
    loop {
        match File::options().read(true).write(true).open(path) {
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::ResourceBusy
                ) && Instant::now() < deadline =>
            {
                std::thread::sleep(LOOK);
            }
            result => return result,
        }
    }
}

/// The logical block of a device: what it never tears, or cannot do less than.
fn logical(traits: &Traits) -> u32 {
    traits.block_min.max(SECTOR as u32)
}

/// What the kernel is told of a device.
fn params(device: &dyn Device) -> Result<Params, Error> {
    let traits = device.traits();
    let logical = logical(&traits);
    if u64::from(logical) > rustix::param::page_size() as u64 {
        return Err(Error::Unfit(format!("its blocks of {logical} bytes are larger than pages")));
    }
    // What is left of a last block that is not whole cannot be reached.
    let size = device.size() / u64::from(logical) * u64::from(logical);
    if size == 0 {
        return Err(Error::Unfit("it has no bytes: a disk has at least one block".into()));
    }
    let best = traits.block_preferred.max(logical);
    let mut params = Params { types: abi::PARAMS_BASIC, ..Params::default() };
    params.basic = abi::Basic {
        attributes: attribute::VOLATILE_CACHE
            | attribute::FUA
            | if traits.read_only { attribute::READ_ONLY } else { 0 },
        logical_shift: logical.trailing_zeros() as u8,
        physical_shift: best.min(4096).max(logical).trailing_zeros() as u8,
        optimal_shift: best.trailing_zeros() as u8,
        minimal_shift: best.min(4096).max(logical).trailing_zeros() as u8,
        max_sectors: IO_BYTES / SECTOR as u32,
        sectors: size / SECTOR,
        ..abi::Basic::default()
    };
    if !traits.read_only {
        let zeroes = if traits.fast_zero { RANGE_BYTES } else { ZERO_BYTES };
        params.types |= abi::PARAMS_DISCARD;
        params.discard = abi::Discard {
            alignment: 0,
            granularity: best.max(4096),
            max_sectors: RANGE_BYTES / SECTOR as u32,
            max_zero_sectors: zeroes / SECTOR as u32,
            max_segments: 1,
            reserved: 0,
        };
    }
    Ok(params)
}

/// Whether a device is as good as the one that the kernel was told of.
fn fits(was: &Params, info: &Info, device: &dyn Device) -> Result<(), Error> {
    let id = info.id;
    let unfit = |why: String| Err(Error::Unfit(format!("/dev/ublkb{id} {why}")));
    let (size, now) = (was.basic.sectors * SECTOR, device.size());
    if now < size {
        return unfit(format!("has {size} bytes, and what is to be behind it {now}"));
    }
    let traits = device.traits();
    if logical(&traits) > 1 << was.basic.logical_shift {
        let now = logical(&traits);
        return unfit(format!(
            "has blocks of {} bytes, not {now}",
            1_u32 << was.basic.logical_shift
        ));
    }
    if traits.read_only && was.basic.attributes & attribute::READ_ONLY == 0 {
        return unfit("may be written, and what is to be behind it may not".into());
    }
    if info.flags & flag::AUTO_BUF_REG != 0 && device.file().is_none() {
        return unfit(
            "was made without a copy of its data, which needs a plain file without a cache".into(),
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{Blocking, Memory, ReadOnly};

    fn memory(size: u64) -> Arc<dyn Device> {
        Arc::new(Blocking(Memory::new(size)))
    }

    #[test]
    fn the_kernel_is_told_what_a_device_is() {
        let told = params(&*memory((1 << 20) + 700)).unwrap();
        assert_eq!(told.types, abi::PARAMS_BASIC | abi::PARAMS_DISCARD);
        assert_eq!(told.basic.sectors, 2049);
        assert_eq!((told.basic.logical_shift, told.basic.physical_shift), (9, 12));
        assert_eq!(told.basic.attributes, attribute::VOLATILE_CACHE | attribute::FUA);
        let told = params(&ReadOnly(memory(1 << 20))).unwrap();
        assert_eq!(told.types, abi::PARAMS_BASIC);
        assert_ne!(told.basic.attributes & attribute::READ_ONLY, 0);
        let none = params(&*memory(511)).unwrap_err().to_string();
        assert!(none.contains("no bytes"), "{none}");
    }

    #[test]
    fn what_is_not_what_was_served_is_refused() {
        let was = params(&*memory(1 << 20)).unwrap();
        let info = Info { id: 3, ..Info::default() };
        fits(&was, &info, &*memory(1 << 20)).unwrap();
        fits(&was, &info, &*memory(2 << 20)).unwrap();
        let wrong =
            |info: &Info, device: &dyn Device| fits(&was, info, device).unwrap_err().to_string();
        assert!(wrong(&info, &*memory(1 << 19)).contains("/dev/ublkb3 has 1048576 bytes"));
        assert!(wrong(&info, &ReadOnly(memory(1 << 20))).contains("may be written"));
        let direct = Info { flags: flag::AUTO_BUF_REG, ..info };
        assert!(wrong(&direct, &*memory(1 << 20)).contains("plain file"));
    }
}
