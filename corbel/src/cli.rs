//! The command line: every verb with its help and examples. Where a verb's arguments belong to a
//! module of its own, the structure is there.

use std::path::PathBuf;

use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::config::Config;
use crate::failure::{Context, Failure, Result};
use crate::output::Output;

/// A replicated POSIX file system for applications that cannot wait for their storage.
#[derive(Parser, Debug)]
#[command(
    name = "corbel",
    version,
    disable_help_subcommand = true,
    after_help = "Examples:\n  corbel cluster up                      three nodes on this machine, mounted\n  \
        corbel run -- sqlite3 MNT/a.db         an unmodified program on the fast path\n  \
        corbel status                          roles, epoch, durability, clients\n  \
        corbel bench fsync-chain --json        a figure, measured here and now\n\n\
        Exit codes: 0 done, 1 failed, 2 usage, 3 configuration, 4 unreachable, 5 damaged,\n  \
        6 timeout, 7 the machine lacks something, 130 interrupted.\n  \
        fsck has the codes of fsck(8); run ends with the program's own code."
)]
pub struct Cli {
    /// Options of every verb.
    #[command(flatten)]
    pub global: Global,
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

impl Cli {
    /// What is logged.
    pub fn log_level(&self) -> log::LevelFilter {
        let of_verb = match &self.verb {
            Verb::Virtiofs(args) => args.log_level(),
            _ => None,
        };
        of_verb.unwrap_or(self.global.log_level)
    }
}

/// Options of every verb.
#[derive(Args, Debug, Clone)]
pub struct Global {
    /// Print JSON: results on standard output, failures as {"error":{"code","message","remedy"}}
    #[arg(long, global = true)]
    pub json: bool,
    /// Configuration file
    #[arg(long, short, global = true, value_name = "FILE", env = "CORBEL_CONFIG")]
    pub config: Option<PathBuf>,
    /// Overrule a key of the configuration, for example --set node.id=2 (repeatable)
    #[arg(long, global = true, value_name = "SECTION.KEY=VALUE")]
    pub set: Vec<String>,
    /// Log level: error, warn, info, debug, trace
    #[arg(long, global = true, value_name = "LEVEL", env = "CORBEL_LOG", default_value = "warn")]
    pub log_level: log::LevelFilter,
}

impl Global {
    /// The configuration in effect: file, then --set.
    pub fn load(&self) -> Result<Config> {
        Config::load(self.config.as_deref(), &self.set)
    }
}

/// The verbs.
#[derive(Subcommand, Debug)]
pub enum Verb {
    /// Mount the volume, for every program of this machine
    Mount(crate::mount::MountArgs),
    /// Be a virtio-fs device, for a virtual machine that mounts it
    Virtiofs(Box<crate::virtiofs::VirtiofsArgs>),
    /// Serve block devices to NBD clients
    Nbd(crate::nbd::NbdArgs),
    /// Be a block device of this machine's kernel, over io_uring
    Ublk(crate::ublk::UblkArgs),
    /// Images over stores: replicated or coded, repaired and scrubbed
    #[command(subcommand)]
    Pool(crate::pool::PoolVerb),
    /// Make the region of a node and an empty volume in it
    Mkfs(crate::mkfs::MkfsArgs),
    /// Run the services of a node, or one of them, or the coordinator
    #[command(
        after_help = "Examples:\n  corbel serve --config node1.toml              hostd and nicfs, \
        supervised\n  corbel serve coordinator --config node1.toml"
    )]
    Serve(crate::serve::ServeArgs),
    /// Show role, epoch, chain, durability and clients of a node
    Status(crate::status::StatusArgs),
    /// Check the region of a node; compare replicas
    Fsck(crate::fsck::FsckArgs),
    /// Read all that a node holds, compare it with its checksums, mend what is rotten
    Scrub(crate::scrub::ScrubArgs),
    /// Bring the region of a node to the format of this version, in place
    Upgrade(crate::upgrade::UpgradeArgs),
    /// Show three nodes, real programs and the loss of the primary
    Demo(crate::demo::DemoArgs),
    /// Show and set how much users and directories may take
    Quota(crate::quota::QuotaArgs),
    /// Make, list and delete snapshots of a directory; keep some by the hour and by the day
    Snapshot(crate::snapshot::SnapshotArgs),
    /// Write a snapshot, or what it has otherwise than an earlier one, to standard output: a backup, or a copy elsewhere
    Send(crate::transfer::send::SendArgs),
    /// Take in what corbel send wrote, into a directory of this volume
    Receive(crate::transfer::receive::ReceiveArgs),
    /// Show what copy of the volume each node has; go on with one, if the chain has lost its own
    Recover(crate::recover::RecoverArgs),
    /// Make and show the certificates by which machines know each other
    #[command(subcommand)]
    Cert(crate::cert::CertVerb),
    /// A local cluster for trying things
    #[command(subcommand)]
    Cluster(crate::cluster::ClusterVerb),
    /// Measure, here and now
    #[command(subcommand)]
    Bench(crate::bench::BenchVerb),
    /// Compile, decompile and test CRUSH maps, as with crushtool
    #[command(subcommand)]
    Crush(crate::crush::CrushVerb),
    /// Where objects of a Ceph cluster lie
    #[command(subcommand)]
    Rados(crate::rados::RadosVerb),
    /// Read, show or write the configuration
    #[command(subcommand)]
    Config(ConfigVerb),
    /// Run an unmodified program on the fast path
    Run(crate::run::RunArgs),
    /// Print the completion script of a shell
    #[command(after_help = "Example:\n  corbel completion bash > /etc/bash_completion.d/corbel")]
    Completion {
        /// Shell
        shell: clap_complete::Shell,
    },
    /// Write the man pages of all verbs into a directory
    #[command(after_help = "Example:\n  corbel man /usr/local/share/man/man1")]
    Man {
        /// Directory; without it the page of corbel itself is printed
        dir: Option<PathBuf>,
    },
}

/// Verbs of `corbel config`.
#[derive(Subcommand, Debug)]
pub enum ConfigVerb {
    /// Say whether a file is right, and if not, which line of it
    #[command(after_help = "Example:\n  corbel config check /etc/corbel/corbel.toml")]
    Check {
        /// File
        file: PathBuf,
    },
    /// Print the configuration in effect (defaults, file, --set)
    Show,
    /// Print a file with every key, its meaning and its default
    #[command(after_help = "Example:\n  corbel config generate > /etc/corbel/corbel.toml")]
    Generate,
}

/// Runs `corbel config …`.
pub fn config(global: &Global, out: &Output, verb: &ConfigVerb) -> Result<()> {
    match verb {
        ConfigVerb::Check { file } => {
            Config::load(Some(file), &global.set)?;
            out.result(
                &serde_json::json!({"file": file.display().to_string(), "ok": true}),
                || {
                    println!("{}: right", file.display());
                },
            );
        }
        ConfigVerb::Show => {
            let config = global.load()?;
            out.result(&config.to_json(), || print!("{}", config.render()));
        }
        ConfigVerb::Generate => {
            let config = Config::default();
            out.result(&config.to_json(), || print!("{}", config.render()));
        }
    }
    Ok(())
}

/// Prints a completion script.
pub fn completion(shell: clap_complete::Shell) {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "corbel", &mut script);
    print!("{}", String::from_utf8_lossy(&script));
}

/// Writes or prints man pages.
pub fn man(out: &Output, dir: Option<&PathBuf>) -> Result<()> {
    let command = Cli::command();
    let Some(dir) = dir else {
        let mut page = Vec::new();
        clap_mangen::Man::new(command).render(&mut page).context("rendering the page")?;
        print!("{}", String::from_utf8_lossy(&page));
        return Ok(());
    };
    std::fs::create_dir_all(dir).context(dir.display())?;
    clap_mangen::generate_to(command, dir).context(dir.display())?;
    let pages = std::fs::read_dir(dir).context(dir.display())?.count();
    out.result(&serde_json::json!({"dir": dir.display().to_string(), "files": pages}), || {
        println!("{}: {pages} files", dir.display());
    });
    Ok(())
}

/// Reads the command line. Help and version end here with code 0; errors come back.
pub fn parse() -> Result<Cli> {
    let args: Vec<_> = std::env::args_os().collect();
    let args = crate::mount::helper_command_line(&args)
        .or_else(|| crate::virtiofs::command_line(&args))
        .unwrap_or(args);
    Cli::try_parse_from(args).map_err(|error| {
        use clap::error::ErrorKind;
        if matches!(
            error.kind(),
            ErrorKind::DisplayHelp
                | ErrorKind::DisplayVersion
                | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
        ) {
            error.exit();
        }
        let text = error.to_string();
        let mut lines = text.lines().map(str::trim).filter(|l| !l.is_empty());
        let first = lines.next().unwrap_or("wrong command line").trim_start_matches("error: ");
        let mut message = first.to_string();
        // What is missing stands on lines of its own.
        while message.ends_with(':') || message.ends_with(',') {
            let Some(next) = lines.next() else { break };
            message = format!("{message} {next}");
        }
        let rest: Vec<&str> = lines.filter(|l| !l.starts_with("For more")).collect();
        let remedy = format!("{}; --help has examples", rest.join("; "));
        let mut failure = Failure::new(
            crate::failure::Kind::Usage,
            message,
            remedy.trim_start_matches("; ").to_string(),
        );
        if std::env::args().take_while(|arg| arg != "--").any(|arg| arg == "fsck") {
            failure.exit = Some(16);
        }
        failure
    })
}
