//! A device as a process of its own, that can be killed.

use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use client::dir::{self, DirFs};
use virtiofs::device::{Device, Options};
use virtiofs::driver::Driver;
use virtiofs::ledger::Ledger;
use virtiofs::tenant::{self, Tenant};
use virtiofs::transfer::Key;

use super::scratch;

const PLACE: &str = "VIRTIOFS_TEST_DEVICE";

/// What such a process does. A test program has it in a test of the name `device_process`, which does nothing when it is run as one.
pub fn body() {
    let Some(root) = std::env::var_os(PLACE).map(PathBuf::from) else { return };
    let shared = root.join("shared");
    let fs = DirFs::open(shared.to_str().unwrap().as_bytes(), dir::Options::default()).unwrap();
    let fs = Tenant::new(Arc::new(fs), b"/", tenant::Options::default()).unwrap();
    let mut options = Options::default();
    options.guest.nodes_max = 1000;
    let (ledger, kept) = Ledger::open(&root.join("state"), &options.guest).unwrap();
    options.ledger = Some(Arc::new(ledger));
    if let Ok(key) = std::fs::read(root.join("key")) {
        options.seal = Some(Key::new(&key, "one").unwrap().seal(&fs).unwrap());
    }
    let device = Device::new(Arc::new(fs), options);
    if let Some(kept) = kept {
        // Those are lost that have no name any more.
        device.resume(kept);
    }
    let rings = virtiofs::vhost::rings("test", 4).unwrap();
    let _crew = device.start(&*rings).unwrap();
    let socket = root.join("socket");
    let _ = std::fs::remove_file(&socket);
    let listener = UnixListener::bind(root.join("socket.new")).unwrap();
    std::fs::rename(root.join("socket.new"), socket).unwrap();
    for stream in listener.incoming() {
        virtiofs::vhost::serve(&rings, Some(&device), None, stream.unwrap());
    }
}

pub struct Process {
    pub root: PathBuf,
    child: Child,
}

impl Process {
    pub fn start(root: &Path) -> Self {
        Self { root: root.to_path_buf(), child: Self::spawn(root) }
    }

    /// One whose state may travel.
    pub fn keyed() -> Self {
        let root = scratch();
        std::fs::write(root.join("key"), [7; 32]).unwrap();
        Self::start(&root)
    }

    /// Another one with the same directory.
    pub fn beside(&self) -> Self {
        let root = scratch();
        std::fs::write(root.join("key"), [7; 32]).unwrap();
        std::fs::remove_dir(root.join("shared")).unwrap();
        std::os::unix::fs::symlink(self.root.join("shared"), root.join("shared")).unwrap();
        Self::start(&root)
    }

    fn spawn(root: &Path) -> Child {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "device_process", "--nocapture"])
            .env(PLACE, root)
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    }

    pub fn connect(&self) -> UnixStream {
        for _ in 0..6000 {
            if let Ok(stream) = UnixStream::connect(self.root.join("socket")) {
                return stream;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("the device does not come up");
    }

    /// kill -9, and another one.
    pub fn replace(&mut self, guest: &mut Driver) {
        self.kill();
        self.child = Self::spawn(&self.root);
        guest.reconnect(self.connect()).unwrap();
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(self.root.join("socket"));
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        let _ = std::fs::remove_dir_all(&self.root);
    }
}
