//! vhost-user: the protocol by which a virtual machine monitor (QEMU, Cloud Hypervisor, crosvm) hands us the queues of its
//! guest over a Unix socket (QEMU's docs/interop/vhost-user.rst). The crate `vhost` speaks it; here is what is done.

use std::fs::File;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

use vhost::vhost_user::message::{
    VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags, VhostUserInflight,
    VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures as Protocol,
    VhostUserShMemConfig, VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags,
    VhostUserVringState,
};
use vhost::vhost_user::{
    BackendReqHandler, Error, GpuBackend, Result, VhostUserBackendReqHandlerMut,
};

use crate::device::Device;
use crate::dirty::Log;
use crate::inflight::Region as Inflight;
use crate::memory::{Memory, REGIONS_MAX, Region};
use crate::transfer::Transfer;
use crate::vring::{Marks, SIZE_MAX, Vring, Vrings};

/// Longest tag, which the guest mounts by.
pub const TAG_MAX: usize = 36;
/// Queues beside the first at most.
pub const QUEUES_MAX: usize = 64;

/// What we write to the guest's memory is logged while a monitor has this set (a bit of vhost's, not of the guest's).
const LOG_ALL: u64 = 1 << 26;
/// Feature bits (virtio 1.3, 6).
const INDIRECT_DESC: u64 = 1 << 28;
const EVENT_IDX: u64 = 1 << 29;
const PROTOCOL_FEATURES: u64 = 1 << 30;
const VERSION_1: u64 = 1 << 32;
const FEATURES: u64 = INDIRECT_DESC | EVENT_IDX | PROTOCOL_FEATURES | VERSION_1;

/// What the guest reads of its device (virtio 1.3, 5.11.4): tag, number of request queues, size of notifications.
fn config_space(tag: &str, queues: usize) -> Vec<u8> {
    let mut space = vec![0; TAG_MAX + 8];
    space[..tag.len().min(TAG_MAX)].copy_from_slice(&tag.as_bytes()[..tag.len().min(TAG_MAX)]);
    space[TAG_MAX..TAG_MAX + 4].copy_from_slice(&u32::try_from(queues).unwrap_or(1).to_le_bytes());
    space
}

/// One monitor's session.
struct Session {
    rings: Arc<Vrings>,
    /// What the guest may read, if it was given a tag here and not by its monitor.
    config: Option<Vec<u8>>,
    memory: Arc<Memory>,
    inflight: Option<Arc<Inflight>>,
    features: u64,
    /// Where dirty pages are logged, while the monitor wants them logged.
    log: Option<Arc<Log>>,
    /// Whose state can be handed on, and what is under way of that.
    device: Option<Arc<Device>>,
    transfer: Option<Transfer>,
}

/// What went wrong is logged here, and the monitor told that it did.
fn refuse(what: impl std::fmt::Display) -> Error {
    log::warn!("vhost-user: {what}");
    Error::ReqHandlerError(std::io::Error::other(what.to_string()))
}

impl Session {
    fn ring(&self, index: u32) -> Result<&Arc<Vring>> {
        let ring = usize::try_from(index).ok().and_then(|index| self.rings.all.get(index));
        ring.ok_or_else(|| refuse(format!("there is no queue {index}")))
    }

    fn set_memory(&mut self, memory: Memory) {
        self.memory = Arc::new(memory);
        self.rings.all.iter().for_each(|ring| ring.set_memory(self.memory.clone()));
    }

    fn reset(&mut self) {
        self.rings.all.iter().for_each(|ring| ring.reset());
        (self.memory, self.inflight) = (Arc::default(), None);
        (self.features, self.log) = (0, None);
    }

    /// Whether the guest may move to another device. Only then anybody needs to know what is written.
    fn may_move(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.seal().is_some())
    }

    fn offered(&self) -> u64 {
        if self.may_move() { FEATURES | LOG_ALL } else { FEATURES }
    }

    /// Has the queues log, or not, as the monitor has said so far: the feature and the log may come in either order, and either may
    /// change while the queues run.
    fn set_marks(&self) {
        let marks = match &self.log {
            _ if self.features & LOG_ALL == 0 => Marks::Off,
            None => Marks::Awaited,
            Some(log) => Marks::On(log.clone()),
        };
        self.rings.all.iter().for_each(|ring| ring.set_marks(marks.clone()));
    }
}

impl VhostUserBackendReqHandlerMut for Session {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset();
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        self.reset();
        // Whether the guest mounts again or not: what it had is not its any more.
        if let Some(device) = &self.device {
            device.forget_guest();
        }
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.offered())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        let beyond = features & !self.offered();
        if beyond != 0 {
            return Err(refuse(format!("features {beyond:#x} were not offered")));
        }
        self.features = features;
        // Before the rest: this may be what lets the queues run.
        self.set_marks();
        for ring in &self.rings.all {
            ring.set_event_index(features & EVENT_IDX != 0);
            // Else they are enabled one by one.
            if features & PROTOCOL_FEATURES == 0 {
                ring.set_enabled(true);
            }
        }
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        let region = |r: &VhostUserMemoryRegion| Region {
            guest: r.guest_phys_addr,
            len: r.memory_size,
            user: r.user_addr,
            offset: r.mmap_offset,
        };
        let memory =
            Memory::new(regions.iter().map(region).zip(files).collect()).map_err(refuse)?;
        self.set_memory(memory);
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        self.ring(index)?.set_size(num).map_err(refuse)
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Result<()> {
        // Without the flag a ring is logged as well, if anything is: where we find it.
        let log = flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG).then_some(log);
        self.ring(index)?.set_addresses(descriptor, available, used, log).map_err(refuse)
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let base = u16::try_from(base).map_err(|_| refuse("base of a queue above 65535"))?;
        self.ring(index)?.set_base(base);
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let base = self.ring(index)?.stop_at();
        Ok(VhostUserVringState::new(index, base.into()))
    }

    fn set_vring_kick(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        let ring = self.ring(index.into())?;
        if self.transfer.is_some() {
            return Err(refuse("a queue is started while the state of the device is on its way"));
        }
        if let Some(device) = &self.device {
            device.go_on();
        }
        let inflight = self.inflight.clone().filter(|i| i.has(index.into(), 1));
        ring.start(fd, inflight).map_err(refuse)
    }

    fn set_vring_call(&mut self, index: u8, fd: Option<File>) -> Result<()> {
        self.ring(index.into())?.set_call(fd);
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, _: Option<File>) -> Result<()> {
        self.ring(index.into()).map(drop)
    }

    fn get_protocol_features(&mut self) -> Result<Protocol> {
        // QEMU has the tag from its own command line, and some of its versions do not take well to being offered another.
        let config = if self.config.is_some() { Protocol::CONFIG } else { Protocol::empty() };
        let state = if self.may_move() {
            Protocol::DEVICE_STATE | Protocol::LOG_SHMFD
        } else {
            Protocol::empty()
        };
        Ok(config
            | state
            | Protocol::MQ
            | Protocol::INFLIGHT_SHMFD
            | Protocol::CONFIGURE_MEM_SLOTS
            | Protocol::RESET_DEVICE)
    }

    fn set_protocol_features(&mut self, _: u64) -> Result<()> {
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.rings.all.len() as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.ring(index)?.set_enabled(enable);
        Ok(())
    }

    fn get_config(&mut self, offset: u32, size: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        let to = from.saturating_add(size as usize);
        let part = self.config.as_ref().and_then(|config| config.get(from..to));
        part.map(<[u8]>::to_vec).ok_or_else(|| refuse(format!("no configuration at {offset}")))
    }

    fn set_config(&mut self, _: u32, _: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        Err(Error::InvalidOperation("the configuration is read-only"))
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        Err(Error::InvalidOperation("this is no display"))
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InvalidOperation("there are no shared objects"))
    }

    fn get_inflight_fd(&mut self, asked: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queues, size) = (asked.num_queues, asked.queue_size);
        if queues == 0 || usize::from(queues) > self.rings.all.len() || size == 0 || size > SIZE_MAX
        {
            return Err(refuse(format!("inflight region for {queues} queues of {size}")));
        }
        let (file, len) = Inflight::create(queues, size).map_err(refuse)?;
        let region = file.try_clone().map_err(|e| e.to_string());
        let region = region.and_then(|file| Inflight::map(file, 0, queues, size));
        self.inflight = Some(Arc::new(region.map_err(refuse)?));
        Ok((VhostUserInflight::new(len, 0, queues, size), file))
    }

    fn set_inflight_fd(&mut self, inflight: &VhostUserInflight, file: File) -> Result<()> {
        let (queues, size) = (inflight.num_queues, inflight.queue_size);
        if usize::from(queues) > self.rings.all.len() || size > SIZE_MAX {
            return Err(refuse(format!("inflight region for {queues} queues of {size}")));
        }
        let region = Inflight::map(file, inflight.mmap_offset, queues, size).map_err(refuse)?;
        self.inflight = Some(Arc::new(region));
        Ok(())
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(REGIONS_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _: Option<bool>,
    ) -> Result<Option<u64>> {
        let region = Region {
            guest: region.guest_phys_addr,
            len: region.memory_size,
            user: region.user_addr,
            offset: region.mmap_offset,
        };
        let memory = self.memory.with(region, file).map_err(refuse)?;
        self.set_memory(memory);
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let memory = self.memory.without(region.guest_phys_addr, region.memory_size);
        self.set_memory(memory.map_err(refuse)?);
        Ok(())
    }

    fn set_device_state_fd(
        &mut self,
        direction: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        file: File,
    ) -> Result<Option<File>> {
        let device = self.device.as_ref().ok_or_else(|| refuse("no device to hand on is here"))?;
        let seal = device.seal().ok_or_else(|| {
            refuse("a device without a key (--migration-key) hands nothing on, and takes nothing")
        })?;
        if self.rings.all.iter().any(|ring| ring.is_started()) {
            return Err(refuse("the state of a device is handed on while its queues are stopped"));
        }
        let begun = match direction {
            VhostTransferStateDirection::SAVE => Transfer::save(device, &self.rings, seal, file),
            VhostTransferStateDirection::LOAD => Transfer::load(device, &self.rings, seal, file),
        };
        self.transfer = Some(begun.map_err(refuse)?);
        Ok(None)
    }

    fn check_device_state(&mut self) -> Result<()> {
        let transfer = self.transfer.take().ok_or_else(|| refuse("no state is under way"))?;
        transfer.end().map_err(refuse)
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Ok(VhostUserShMemConfig::default())
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        if !self.may_move() {
            return Err(refuse(
                "a device without a key (--migration-key) cannot be moved, and logs no dirty pages",
            ));
        }
        let log = Log::map(file, log.mmap_offset, log.mmap_size).map_err(refuse)?;
        self.log = Some(Arc::new(log));
        // When the monitor is answered, nothing is marked in the log before, which it then reads for the last time.
        self.set_marks();
        Ok(())
    }
}

/// The stopped queues of a device.
///
/// # Errors
/// Out of descriptors.
pub fn rings(tenant: &str, queues: usize) -> std::io::Result<Arc<Vrings>> {
    let all = (0..=queues.clamp(1, QUEUES_MAX)).map(Vring::new).collect::<std::io::Result<_>>()?;
    Ok(Arc::new(Vrings { all, tenant: tenant.into() }))
}

/// How long a guest's monitor is waited for.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// The first one, where a guest is known from before.
    pub first: Option<Duration>,
    /// The next one, when one has hung up.
    pub next: Duration,
}

/// What a guest is to whoever serves it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Monitor {
    /// One has come.
    Here,
    /// None has come in time: the guest is gone.
    Gone,
}

/// Whether somebody connects within that time.
fn comes(listener: &UnixListener, within: Duration) -> bool {
    let end = Instant::now() + within;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let left = Timespec {
            tv_sec: left.as_secs().cast_signed(),
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        match poll(&mut [PollFd::new(listener, PollFlags::IN)], Some(&left)) {
            Ok(0) => return false,
            Err(rustix::io::Errno::INTR) => {}
            // What is wrong with it `accept` says.
            Ok(_) | Err(_) => return true,
        }
    }
}

/// Serves one monitor after the other by `serve`, and says when the guest is there and when it is gone: a guest that was killed shall not
/// keep its files and locks for ever. One whose monitor connects again does.
pub fn serve_all(
    listener: &UnixListener,
    patience: Patience,
    once: bool,
    mut serve: impl FnMut(UnixStream),
    mut says: impl FnMut(Monitor),
) {
    let mut within = patience.first;
    loop {
        if within.is_some_and(|within| !comes(listener, within)) {
            says(Monitor::Gone);
        }
        within = Some(patience.next);
        match listener.accept() {
            Ok((stream, _)) => {
                says(Monitor::Here);
                serve(stream);
            }
            Err(error) => {
                log::warn!("waiting for a monitor: {error}");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        if once {
            return;
        }
    }
}

/// Does what a monitor asks, until it hangs up. The queues are stopped then, and as if they had never been used. The guest is told
/// `tag` by monitors that ask us for it. The state of `device` is handed to who asks for it, and taken, if it has a seal.
pub fn serve(
    rings: &Arc<Vrings>,
    device: Option<&Arc<Device>>,
    tag: Option<&str>,
    stream: UnixStream,
) {
    let session = Session {
        rings: rings.clone(),
        config: tag.map(|tag| config_space(tag, rings.all.len() - 1)),
        memory: Arc::default(),
        inflight: None,
        features: 0,
        log: None,
        device: device.cloned(),
        transfer: None,
    };
    let session = Arc::new(Mutex::new(session));
    let mut handler = BackendReqHandler::from_stream(stream, session.clone());
    loop {
        match handler.handle_request() {
            Ok(()) => {}
            Err(Error::SocketRetry(_)) => {}
            Err(Error::Disconnected | Error::SocketBroken(_) | Error::PartialMessage) => break,
            // It was told, where it wanted to know. One that waits for an answer that there is not would wait for ever.
            Err(error) => {
                log::warn!("vhost-user: {error}; hanging up");
                break;
            }
        }
    }
    drop(handler);
    if let Ok(mut session) = session.lock() {
        session.reset();
    }
}
