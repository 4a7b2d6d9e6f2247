//! Nodes of a local cluster, each in a network namespace of its own, so that the link to one of them can be cut:
//! then nothing reaches it and nothing leaves it, and nobody is told. The network of the machine is left alone.
//!
//! ```text
//! DIR/net/hub    the namespace with the coordinator and a bridge, 10.0.0.254
//! DIR/net/N      that of node N, 10.0.0.N, behind the port nN of the bridge
//! ```
//!
//! Sockets with a path do not belong to a namespace: programs reach hostd from everywhere.

use std::ffi::OsStr;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::failure::{Context, Failure, Kind, Result};

/// The coordinator's last byte of the address.
const HUB: u8 = 254;

/// The namespaces of a cluster.
#[derive(Debug)]
pub struct Links {
    dir: PathBuf,
}

/// Where somebody runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// With the coordinator.
    Hub,
    /// On a node.
    Node(u32),
}

impl Side {
    fn name(self) -> String {
        match self {
            Self::Hub => "hub".into(),
            Self::Node(node) => node.to_string(),
        }
    }

    /// Its address.
    pub fn address(self) -> IpAddr {
        let last = match self {
            Self::Hub => HUB,
            Self::Node(node) => u8::try_from(node).unwrap_or(HUB - 1),
        };
        IpAddr::V4(Ipv4Addr::new(10, 0, 0, last))
    }
}

impl Links {
    /// Those of the cluster in `dir`.
    pub fn of(dir: &Path) -> Self {
        Self { dir: dir.join("net") }
    }

    /// Whether this machine, and this user, can have them.
    pub fn are_possible() -> bool {
        let has = |tool: &str| {
            Command::new(tool).arg("--version").output().is_ok_and(|o| o.status.success())
                || Command::new(tool).arg("-V").output().is_ok_and(|o| o.status.success())
        };
        rustix::process::geteuid().is_root() && ["unshare", "nsenter", "ip"].into_iter().all(has)
    }

    /// Makes the namespaces and what joins them.
    pub fn make(&self, nodes: u32) -> Result<()> {
        std::fs::create_dir_all(&self.dir).context(self.dir.display())?;
        self.space(Side::Hub)?;
        let ip = |side, words: &str| self.tool(side, "ip", words);
        ip(Side::Hub, "link add hub type bridge")?;
        ip(Side::Hub, "link set hub up")?;
        ip(Side::Hub, &format!("addr add {}/24 dev hub", Side::Hub.address()))?;
        for node in 1..=nodes {
            let side = Side::Node(node);
            self.space(side)?;
            let space = self.path(side);
            let space = space.display();
            ip(Side::Hub, &format!("link add n{node} type veth peer name port netns {space}"))?;
            ip(Side::Hub, &format!("link set n{node} master hub"))?;
            ip(Side::Hub, &format!("link set n{node} up"))?;
            ip(side, &format!("addr add {}/24 dev port", side.address()))?;
            ip(side, "link set port up")?;
        }
        Ok(())
    }

    /// Cuts the link of a node, or mends it.
    pub fn set(&self, node: u32, up: bool) -> Result<()> {
        let how = if up { "up" } else { "down" };
        self.tool(Side::Hub, "ip", &format!("link set n{node} {how}"))
    }

    /// Limits the link of a node, in both directions, to so many bits a second.
    pub fn limit(&self, node: u32, bits: u64) -> Result<()> {
        // What passes at once is what the line takes in two milliseconds; what waits, in thirty.
        let (burst, waits) = (bits / 8 / 500, bits / 8 * 3 / 100);
        let how = format!("root tbf rate {bits}bit burst {burst} limit {waits}");
        self.tool(Side::Hub, "tc", &format!("qdisc replace dev n{node} {how}"))?;
        self.tool(Side::Node(node), "tc", &format!("qdisc replace dev port {how}"))
    }

    /// Has the calling thread, and what it starts, go on in the network of that side.
    pub fn move_to(&self, side: Side) -> Result<()> {
        use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
        let path = self.path(side);
        let space = std::fs::File::open(&path).context(path.display())?;
        let kind = Some(LinkNameSpaceType::Network);
        move_into_link_name_space(std::os::fd::AsFd::as_fd(&space), kind)
            .map_err(std::io::Error::from)
            .context(path.display())
    }

    /// Gives the namespaces up; each goes with its last process.
    pub fn remove(&self) {
        let entries = std::fs::read_dir(&self.dir).into_iter().flatten().flatten();
        for path in entries.map(|entry| entry.path()) {
            let _ = rustix::mount::unmount(&path, rustix::mount::UnmountFlags::DETACH);
            let _ = std::fs::remove_file(&path);
        }
        let _ = std::fs::remove_dir(&self.dir);
    }

    /// The same command, on that side.
    pub fn enter(&self, side: Side, command: &Command) -> Command {
        let mut inside = Command::new("nsenter");
        inside.arg(format!("--net={}", self.path(side).display())).arg("--");
        inside.arg(command.get_program()).args(command.get_args());
        for (key, value) in command.get_envs() {
            match value {
                Some(value) => inside.env(key, value),
                None => inside.env_remove(key),
            };
        }
        inside
    }

    fn path(&self, side: Side) -> PathBuf {
        self.dir.join(side.name())
    }

    fn space(&self, side: Side) -> Result<()> {
        let path = self.path(side);
        std::fs::write(&path, "").context(path.display())?;
        let mut command = Command::new("unshare");
        command.arg(format!("--net={}", path.display()));
        command.args(["ip", "link", "set", "lo", "up"]);
        run(command)
    }

    fn tool(&self, side: Side, tool: &str, words: &str) -> Result<()> {
        let mut command = Command::new(tool);
        command.args(words.split(' ').map(OsStr::new));
        run(self.enter(side, &command))
    }
}

fn run(mut command: Command) -> Result<()> {
    let lacks = |why: String| {
        let what = "nodes in network namespaces of their own";
        let remedy = "root, unshare and nsenter (util-linux) and ip (iproute2) are needed";
        Failure::new(Kind::Environment, format!("{what}: {why}"), remedy)
    };
    let output = command.output().map_err(|error| lacks(error.to_string()))?;
    if output.status.success() {
        return Ok(());
    }
    Err(lacks(String::from_utf8_lossy(&output.stderr).trim().to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_the_same_on_a_side() {
        let links = Links::of(Path::new("/x"));
        let mut command = Command::new("program");
        command.args(["a", "b c"]).env("KEY", "value").env_remove("GONE");
        let inside = links.enter(Side::Node(2), &command);
        let words: Vec<_> = inside.get_args().collect();
        assert_eq!(words, ["--net=/x/net/2", "--", "program", "a", "b c"]);
        let changed: Vec<_> = inside.get_envs().collect();
        assert_eq!(changed.len(), 2);
        assert_eq!(Side::Node(3).address().to_string(), "10.0.0.3");
        assert_eq!(Side::Hub.address().to_string(), "10.0.0.254");
    }
}
