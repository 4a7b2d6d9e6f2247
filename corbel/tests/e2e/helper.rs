//! What mount(8) does with a line of fstab: mount, look, remount, unmount. On the back end `null:`, which
//! needs no cluster.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use super::harness::{CORBEL, Scratch, may_mount, mounted, wait_for};

struct Place(Scratch);

impl Place {
    fn new() -> Option<Self> {
        if !may_mount() {
            return None;
        }
        let place = Self(Scratch::new());
        fs::create_dir(place.point()).unwrap();
        for name in ["mount.corbel", "mount.fuse.corbel"] {
            symlink(CORBEL, place.0.path(name)).unwrap();
        }
        Some(place)
    }

    fn point(&self) -> PathBuf {
        self.0.path("point")
    }

    /// A helper as mount(8) runs it.
    fn helper(&self, name: &str, options: &str) -> Output {
        let mut command = Command::new(self.0.path(name));
        command.arg("null:").arg(self.point()).args(["-o", options]).output().expect("it runs")
    }

    /// The line of the mount table.
    fn line(&self) -> Option<String> {
        mounted(&self.point())
    }
}

/// The processes that serve a mount of ours on that directory.
fn servers(point: &Path) -> usize {
    let of = |entry: fs::DirEntry| fs::read(entry.path().join("cmdline")).unwrap_or_default();
    let wanted = point.as_os_str().as_encoded_bytes();
    let serves = |line: &Vec<u8>| line.split(|b| *b == 0).any(|word| word == wanted);
    fs::read_dir("/proc").unwrap().flatten().map(of).filter(serves).count()
}

#[test]
fn what_mount_does_with_a_line_of_fstab() {
    let Some(place) = Place::new() else { return };
    let refused = place.helper("mount.corbel", "defaults,nonsense");
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
    assert_eq!(place.line(), None);
    let mounted =
        place.helper("mount.corbel", "rw,noatime,_netdev,nofail,x-systemd.automount,soft");
    assert!(mounted.status.success() && mounted.stdout.is_empty(), "{mounted:?}");
    let line = place.line().expect("mounted");
    assert!(line.contains(" fuse.corbel rw,noatime,"), "{line}");
    let file = place.point().join("f");
    fs::write(&file, "x").unwrap();

    // mount(8) repeats what the mount table says.
    let again = "remount,ro,noatime,user_id=0,group_id=0,default_permissions,allow_other";
    let open = fs::File::create(place.point().join("open")).unwrap();
    let busy = place.helper("mount.fuse.corbel", again);
    let said = String::from_utf8_lossy(&busy.stderr).into_owned();
    assert!(!busy.status.success() && said.contains("open for writing"), "{busy:?}");
    drop(open);
    // The kernel gives the file back a moment after its close; the helper waits for that.
    let remounted = place.helper("mount.fuse.corbel", again);
    assert!(remounted.status.success() && remounted.stdout.is_empty(), "{remounted:?}");
    assert!(place.line().expect("mounted").contains(" ro,noatime,"));
    assert_eq!(fs::write(&file, "y").unwrap_err().raw_os_error(), Some(30), "EROFS");
    let writable = place.helper("mount.fuse.corbel", "remount,rw");
    assert!(writable.status.success(), "{writable:?}");
    fs::write(&file, "y").unwrap();

    assert_eq!(servers(&place.point()), 1);
    assert!(Command::new("umount").arg(place.point()).status().unwrap().success());
    assert_eq!(place.line(), None);
    wait_for("the end of the mount's process", Duration::from_secs(60), || {
        (servers(&place.point()) == 0).then_some(())
    });
    let nothing = place.helper("mount.fuse.corbel", "remount,ro");
    assert!(!nothing.status.success(), "nothing is mounted there");
}

/// In the background a mount fails as in the foreground: with the same code, and the same advice.
#[test]
fn a_mount_fails_the_same_in_the_background() {
    let Some(place) = Place::new() else { return };
    let nobody = place.0.path("nobody.sock");
    let fails = |options: &[&str]| {
        let mut mount = Command::new(CORBEL);
        mount.args(["--json", "mount"]).args(options).arg(&nobody).arg(place.point());
        let output = mount.output().expect("it runs");
        (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let (code, said) = fails(&["-f"]);
    assert!(code == Some(4) && said.contains("unreachable"), "{code:?}: {said}");
    assert_eq!(fails(&[]), (code, said));
}
