//! `/dev/ublk-control`: devices are made, found, taken over and removed there.
#![allow(unsafe_code)] // an entry of a ring has no safe wrapper

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use zerocopy::IntoBytes;

use super::abi::control as command;
use super::abi::{ControlCommand, Info, Params, flag};

/// Where the driver takes commands.
const PATH: &str = "/dev/ublk-control";
/// Where the driver lists its devices.
const LIST: &str = "/sys/class/ublk-char";
/// How often somebody who waits for a device to start looks whether that is in vain.
const LOOK: Duration = Duration::from_millis(200);
/// What the driver must be able to do.
const NEEDED: u64 = flag::IOCTL_ENCODE | flag::USER_COPY;

/// Why there is no device.
#[derive(Debug)]
pub enum Error {
    /// This kernel has no `ublk_drv`, or has not loaded it.
    NoDriver,
    /// The driver is root's.
    NoRight,
    /// io_uring may not be used here.
    NoRing(io::Error),
    /// The driver lacks what is needed here.
    TooOld,
    /// There is a device of that number.
    Exists(u32),
    /// There is no device of that number.
    NotThere(u32),
    /// The device is not fit for what is asked: why.
    Unfit(String),
    /// The system refuses something: what.
    System(String, io::Error),
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::NoDriver => {
                write!(f, "{PATH}: this kernel has no ublk_drv, or has not loaded it")
            }
            Self::NoRight => write!(f, "{PATH}: no right to use it"),
            Self::NoRing(error) => write!(f, "io_uring cannot be used here: {error}"),
            Self::TooOld => write!(
                f,
                "ublk_drv of this kernel cannot copy the data of requests (UBLK_F_USER_COPY)"
            ),
            Self::Exists(id) => write!(f, "/dev/ublkb{id}: there is such a device already"),
            Self::NotThere(id) => write!(f, "/dev/ublkb{id}: there is no such device"),
            Self::Unfit(why) => f.write_str(why),
            Self::System(what, error) => write!(f, "{what}: {error}"),
        }
    }
}

impl std::error::Error for Error {}

type CommandRing = IoUring<squeue::Entry128, cqueue::Entry>;

/// The driver.
pub struct Control {
    file: File,
    ring: CommandRing,
    features: u64,
    /// Commands so far.
    commands: u64,
}

impl std::fmt::Debug for Control {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Control").field("features", &self.features).finish_non_exhaustive()
    }
}

fn ring() -> Result<CommandRing, Error> {
    IoUring::builder().dontfork().build(4).map_err(Error::NoRing)
}

fn system(what: impl Into<String>) -> impl FnOnce(io::Error) -> Error {
    let what = what.into();
    |error| Error::System(what, error)
}

impl Control {
    /// Opens it, and sees whether the driver can do what is needed.
    ///
    /// # Errors
    /// Without the driver, the rights, or io_uring, or when the driver is too old.
    pub fn open() -> Result<Self, Error> {
        let file = File::options().read(true).write(true).open(PATH);
        let file = file.map_err(|error| match error.kind() {
            // A node that is there without a driver has no device behind it.
            io::ErrorKind::NotFound => Error::NoDriver,
            io::ErrorKind::PermissionDenied => Error::NoRight,
            _ if matches!(error.raw_os_error(), Some(6 | 19)) => Error::NoDriver,
            _ => Error::System(PATH.into(), error),
        })?;
        let mut control = Self { file, ring: ring()?, features: 0, commands: 0 };
        let mut features = 0_u64;
        control.exchange(command::GET_FEATURES, u32::MAX, features.as_mut_bytes(), 0).map_err(
            |error| match error.kind() {
                io::ErrorKind::PermissionDenied => Error::NoRight,
                // Older ones do not know the question.
                _ => Error::TooOld,
            },
        )?;
        if features & NEEDED != NEEDED {
            return Err(Error::TooOld);
        }
        control.features = features;
        Ok(control)
    }

    /// What the driver can do, of [`flag`].
    pub fn features(&self) -> u64 {
        self.features
    }

    /// The numbers of all devices.
    ///
    /// # Errors
    /// When the system does not tell them.
    pub fn ids(&self) -> Result<Vec<u32>, Error> {
        let mut ids = Vec::new();
        for entry in std::fs::read_dir(LIST).map_err(system(LIST))? {
            let name = entry.map_err(system(LIST))?.file_name();
            let id: Option<u32> =
                name.to_str().and_then(|name| name.strip_prefix("ublkc")?.parse().ok());
            ids.extend(id);
        }
        ids.sort_unstable();
        Ok(ids)
    }

    /// What a device is; none if there is none of that number.
    ///
    /// # Errors
    /// When the driver does not tell.
    pub fn info(&mut self, id: u32) -> Result<Option<Info>, Error> {
        let mut info = Info::default();
        match self.exchange(command::GET_INFO, id, info.as_mut_bytes(), 0) {
            Ok(()) => Ok(Some(info)),
            Err(error) if is_missing(&error) => Ok(None),
            Err(error) => Err(system(format!("asking what device {id} is"))(error)),
        }
    }

    /// Makes a device; its number, and what the kernel changed, is in what comes back.
    ///
    /// # Errors
    /// When there is one of that number, or the kernel refuses.
    pub fn add(&mut self, mut info: Info) -> Result<Info, Error> {
        let id = info.id;
        match self.exchange(command::ADD, id, info.as_mut_bytes(), 0) {
            Ok(()) => Ok(info),
            Err(error) if error.raw_os_error() == Some(17) => Err(Error::Exists(id)),
            Err(error) => Err(system("making a device")(error)),
        }
    }

    /// Says what the disk of a device is like.
    ///
    /// # Errors
    /// When the kernel refuses it.
    pub fn set_params(&mut self, id: u32, mut params: Params) -> Result<(), Error> {
        let what = format!("setting the parameters of device {id}");
        self.exchange(command::SET_PARAMS, id, params.as_mut_bytes(), 0).map_err(system(what))
    }

    /// What the disk of a device is like.
    ///
    /// # Errors
    /// When the kernel does not tell it.
    pub fn params(&mut self, id: u32) -> Result<Params, Error> {
        let mut params = Params::default();
        let what = format!("asking for the parameters of device {id}");
        self.exchange(command::GET_PARAMS, id, params.as_mut_bytes(), 0).map_err(system(what))?;
        Ok(params)
    }

    /// Makes the disk of a device, when all requests of all queues are fetched; until then `in_vain` is asked whether that will never be.
    ///
    /// # Errors
    /// When the kernel refuses, or it is in vain: why.
    pub fn start(&mut self, id: u32, in_vain: impl Fn() -> Option<io::Error>) -> Result<(), Error> {
        let what = format!("starting device {id}");
        let pid = u64::from(std::process::id());
        self.call(command::START, id, &mut [], pid, in_vain).map_err(system(what))
    }

    /// Begins to take a device over whose server is gone. False: it may be tried again, the kernel is not yet done with that server.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn start_recovery(&mut self, id: u32) -> Result<bool, Error> {
        match self.exchange(command::START_RECOVERY, id, &mut [], 0) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => Ok(false),
            Err(error) if is_missing(&error) => Err(Error::NotThere(id)),
            Err(error) => Err(system(format!("taking device {id} over"))(error)),
        }
    }

    /// Ends that, as [`Self::start`] does.
    ///
    /// # Errors
    /// As there.
    pub fn end_recovery(
        &mut self,
        id: u32,
        in_vain: impl Fn() -> Option<io::Error>,
    ) -> Result<(), Error> {
        let what = format!("taking device {id} over");
        let pid = u64::from(std::process::id());
        self.call(command::END_RECOVERY, id, &mut [], pid, in_vain).map_err(system(what))
    }

    /// Removes the disk of a device. What is under way is carried out first, if it has a server.
    ///
    /// # Errors
    /// When there is no such device, or the kernel refuses.
    pub fn stop(&mut self, id: u32) -> Result<(), Error> {
        self.end(command::STOP, id, "stopping")
    }

    /// Removes a device, and waits until its server has let it go.
    ///
    /// # Errors
    /// When there is no such device, or the kernel refuses.
    pub fn delete(&mut self, id: u32) -> Result<(), Error> {
        self.end(command::DELETE, id, "deleting")
    }

    fn end(&mut self, number: u32, id: u32, doing: &str) -> Result<(), Error> {
        match self.exchange(number, id, &mut [], 0) {
            Ok(()) => Ok(()),
            Err(error) if is_missing(&error) => Err(Error::NotThere(id)),
            Err(error) => Err(system(format!("{doing} device {id}"))(error)),
        }
    }

    /// A command, to its end.
    fn exchange(&mut self, number: u32, id: u32, buffer: &mut [u8], data: u64) -> io::Result<()> {
        self.call(number, id, buffer, data, || None)
    }

    fn call(
        &mut self,
        number: u32,
        id: u32,
        buffer: &mut [u8],
        data: u64,
        in_vain: impl Fn() -> Option<io::Error>,
    ) -> io::Result<()> {
        // The kernel writes there until the command has ended, whatever becomes of this call.
        let mut shared = Box::<[u8]>::from(&*buffer);
        let mut command = ControlCommand { id, queue: u16::MAX, data, ..Default::default() };
        if !shared.is_empty() {
            command.addr = shared.as_mut_ptr().expose_provenance() as u64;
            command.len = shared.len() as u16;
        }
        let mut bytes = [0; 80];
        bytes[..size_of::<ControlCommand>()].copy_from_slice(command.as_bytes());
        let file = types::Fd(self.file.as_raw_fd());
        self.commands += 1;
        let entry = opcode::UringCmd80::new(file, number).cmd(bytes).build();
        let entry = entry.user_data(self.commands);
        // SAFETY: the file is open as long as `self`, which has the ring; `shared` is freed only when the command has ended.
        unsafe { self.ring.submission().push(&entry) }.map_err(io::Error::other)?;
        let ended = self.wait(in_vain);
        match ended {
            Ok(0..) => {
                buffer.copy_from_slice(&shared);
                Ok(())
            }
            Ok(error) => Err(io::Error::from_raw_os_error(-error)),
            Err(error) => {
                std::mem::forget(shared);
                // The end of a ring ends what waits in it.
                self.ring = ring().map_err(io::Error::other)?;
                Err(error)
            }
        }
    }

    /// Waits for the end of the command that was pushed: its result.
    fn wait(&mut self, in_vain: impl Fn() -> Option<io::Error>) -> io::Result<i32> {
        let limit = types::Timespec::from(LOOK);
        let limit = types::SubmitArgs::new().timespec(&limit);
        loop {
            let waited = self.ring.submitter().submit_with_args(1, &limit);
            // (One that was given up before may end yet.)
            let (commands, mut ended) = (self.commands, self.ring.completion());
            if let Some(entry) = ended.find(|entry| entry.user_data() == commands) {
                return Ok(entry.result());
            }
            drop(ended);
            match waited {
                // Interrupted, or too long.
                Err(error) if !matches!(error.raw_os_error(), Some(4 | 62)) => return Err(error),
                _ => {}
            }
            if let Some(why) = in_vain() {
                return Err(why);
            }
        }
    }
}

fn is_missing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(2 | 19))
}
