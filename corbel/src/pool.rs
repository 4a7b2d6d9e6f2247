//! `corbel pool`: images over stores.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use block::pool::repair::{self, Orders, Report};
use block::pool::{Coding, Image, Pool, Spec, StoreSpec};
use clap::{Args, Subcommand};
use serde_json::{Value, json};

use crate::failure::{Context, Failure, Kind, Result};
use crate::output::Output;
use crate::units::{parse_bytes, show_bytes};

/// Verbs of `corbel pool`.
#[derive(Subcommand, Debug)]
pub enum PoolVerb {
    /// Make a pool: a file that says which stores it has, and how objects are coded
    #[command(after_help = "Examples:\n  \
        corbel pool create vm.pool --coding replicated:3 --store a=dir:/srv/a --store b=dir:/srv/b --store c=dir:/srv/c\n  \
        corbel pool create cold.pool --coding rs:6,3 $(for i in $(seq 9); do echo --store rack$i=dir:/srv/$i; done)\n\n\
        corbel pool create far.pool --store a=s3:https://s3.example.org/bucket1 --store b=s3:http://10.0.0.7:9000/bucket2/vm …\n  \
        corbel pool create over.pool --coding rs:2,1 --store a=rados:ssd1/vm --store b=rados:ssd2/vm --store c=rados:ssd3/vm\n\n\
        Each store is DOMAIN=PLACE; what fails together has one domain. Directories, buckets and pools of Ceph must be there.\n\n\
        Places:\n  \
        dir:PATH   a directory, which should be a disk of its own\n  \
        s3:URL     a bucket, http or https, with a prefix or without; keys from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,\n             \
        AWS_SESSION_TOKEN, AWS_REGION, authorities from AWS_CA_BUNDLE\n  \
        rados:[USER@]POOL[/NAMESPACE[/PREFIX]][?conf=FILE&reads=balance]\n             \
        a pool of a Ceph cluster, or a namespace of one, through librados (apt install librados2); cluster and keys are\n             \
        found as Ceph's tools find them: CEPH_CONF, CEPH_ARGS, /etc/ceph; reads=balance or localize: replicas are read as well")]
    Create {
        /// File of the pool
        file: PathBuf,
        /// replicated:N or rs:K,M
        #[arg(long, default_value = "replicated:3")]
        coding: Coding,
        /// A store (repeatable)
        #[arg(long, required = true, value_name = "DOMAIN=PLACE")]
        store: Vec<String>,
    },
    /// Make an image of zeroes in a pool; `corbel nbd pool:FILE:NAME` serves it
    #[command(after_help = "Example:\n  corbel pool image vm.pool disk1 --size 20GiB\n  \
        corbel nbd pool:vm.pool:disk1 --cache --write-back")]
    Image {
        /// File of the pool
        file: PathBuf,
        /// Name of the image
        name: String,
        /// Bytes of the image
        #[arg(long, value_parser = parse_bytes)]
        size: u64,
        /// Bytes of an object: cut into shards, or copied
        #[arg(long, value_parser = parse_bytes, default_value = "4MiB")]
        object_size: u64,
    },
    /// Add stores, and put stores out: `corbel pool repair` then moves what is to be moved
    #[command(
        after_help = "Example:\n  corbel pool change vm.pool --add-store d=dir:/srv/d --out dir:/srv/a\n  \
        corbel pool repair vm.pool disk1"
    )]
    Change {
        /// File of the pool
        file: PathBuf,
        /// A store to add (repeatable)
        #[arg(long, value_name = "DOMAIN=PLACE")]
        add_store: Vec<String>,
        /// A store to which nothing new goes (repeatable)
        #[arg(long, value_name = "PLACE")]
        out: Vec<String>,
    },
    /// Say what an image lacks
    Status(ImageArgs),
    /// Make anew what is missing, move what lies in the wrong place, remove what is old
    Repair(ImageArgs),
    /// Read every byte, compare it with its checksum, and make good what is wrong
    Scrub(ImageArgs),
}

/// An image, and how to go through it.
#[derive(Args, Debug, Clone)]
pub struct ImageArgs {
    /// File of the pool
    file: PathBuf,
    /// Name of the image
    name: String,
    /// Read and write at most so many bytes a second
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    rate: Option<u64>,
}

fn config(error: String) -> Failure {
    Failure::new(Kind::Config, error, "see corbel pool create --help")
}

fn parse_store(text: &str) -> Result<StoreSpec> {
    let wrong = |why: &str| {
        let what = format!("--store {text}: {why}");
        Failure::new(
            Kind::Usage,
            what,
            "write DOMAIN=dir:PATH, DOMAIN=s3:URL or DOMAIN=rados:POOL/NAMESPACE",
        )
    };
    let (domain, at) = text.split_once('=').ok_or_else(|| wrong("no domain"))?;
    let at = match at.split_once(':') {
        Some(("dir", path)) => {
            let path = std::fs::canonicalize(path).context(path)?;
            if !path.is_dir() {
                return Err(wrong("no directory"));
            }
            format!("dir:{}", path.display())
        }
        Some(("s3", url)) => {
            url.parse::<block::pool::s3::Place>().map_err(|error| wrong(&error))?;
            at.to_owned()
        }
        Some(("rados", place)) => {
            place.parse::<block::pool::rados::Place>().map_err(|error| wrong(&error))?;
            at.to_owned()
        }
        _ => return Err(wrong("no such kind of store")),
    };
    if domain.is_empty() {
        return Err(wrong("no domain"));
    }
    Ok(StoreSpec { domain: domain.into(), at, out: false })
}

/// Writes a pool's file in one step.
fn write(file: &Path, spec: &Spec) -> Result<()> {
    let new = file.with_extension("new");
    std::fs::write(&new, spec.text()).context(new.display())?;
    std::fs::rename(&new, file).context(file.display())
}

/// Opens an image of a pool.
pub fn open(file: &Path, name: &str, read_only: bool) -> Result<Image> {
    let spec = Spec::read(file).map_err(config)?;
    let pool = Arc::new(Pool::open(spec).map_err(config)?);
    Image::open(pool, name, read_only)
        .map_err(|error| Failure::failed(error, "corbel pool status says which stores are silent"))
}

/// Runs `corbel pool …`.
pub fn run(out: &Output, verb: &PoolVerb) -> Result<()> {
    match verb {
        PoolVerb::Create { file, coding, store } => {
            if file.exists() {
                let what = format!("{}: is there already", file.display());
                return Err(Failure::failed(what, "choose another name"));
            }
            let stores = store.iter().map(|text| parse_store(text)).collect::<Result<_>>()?;
            let spec = Spec::new(*coding, stores).map_err(config)?;
            write(file, &spec)?;
            let told = json!({"pool": file.display().to_string(), "coding": coding.to_string(), "stores": spec.stores.len()});
            out.result(&told, || {
                println!("{}: {coding} over {} stores", file.display(), spec.stores.len());
            });
        }
        PoolVerb::Image { file, name, size, object_size } => {
            let spec = Spec::read(file).map_err(config)?;
            let pool = Pool::open(spec).map_err(config)?;
            let object = u32::try_from(*object_size).unwrap_or(u32::MAX);
            let info = pool
                .create(name, *size, object)
                .map_err(|error| Failure::failed(error, "see corbel pool image --help"))?;
            let told = json!({"image": name, "size": info.size, "objects": info.objects()});
            out.result(&told, || {
                let (size, object) = (show_bytes(info.size), show_bytes(*object_size));
                println!("{name}: {size} in {} objects of {object}", info.objects());
            });
        }
        PoolVerb::Change { file, add_store, out: gone } => {
            let mut spec = Spec::read(file).map_err(config)?;
            for text in add_store {
                spec.stores.push(parse_store(text)?);
            }
            for at in gone {
                let store = spec.stores.iter_mut().find(|store| store.at == *at);
                let store = store.ok_or_else(|| {
                    let what = format!("{}: no store is at {at}", file.display());
                    Failure::new(Kind::Usage, what, "write it as it stands in the file")
                })?;
                store.out = true;
            }
            spec.check().map_err(config)?;
            write(file, &spec)?;
            let told = json!({"stores": spec.stores.len()});
            out.result(&told, || println!("{}: {} stores", file.display(), spec.stores.len()));
        }
        PoolVerb::Status(args) => go_through(out, args, Orders::default())?,
        PoolVerb::Repair(args) => {
            go_through(out, args, Orders { repair: true, ..Orders::default() })?;
        }
        PoolVerb::Scrub(args) => {
            go_through(out, args, Orders { repair: true, verify: true, ..Orders::default() })?;
        }
    }
    Ok(())
}

fn go_through(out: &Output, args: &ImageArgs, orders: Orders) -> Result<()> {
    crate::signals::catch();
    // Where nobody has it open, what is left of writes that never ended goes as well.
    let opened = if orders.repair {
        open(&args.file, &args.name, false)
    } else {
        open(&args.file, &args.name, true)
    };
    let image = match opened {
        Err(_) if orders.repair => open(&args.file, &args.name, true)?,
        opened => opened?,
    };
    let orders = Orders { rate: args.rate.unwrap_or(0), ..orders };
    let mut told = std::time::Instant::now();
    let report = repair::run(&image, orders, |done, of, report| {
        if told.elapsed().as_secs() >= 1 {
            told = std::time::Instant::now();
            let share = 100 * done / of.max(1);
            out.step(format!(
                "{done} of {of} objects ({share} %), {} shards made anew, {} read and written",
                report.rebuilt,
                show_bytes(report.bytes)
            ));
        }
        crate::signals::pending().is_none()
    });
    crate::signals::check()?;
    let report = report.map_err(|errno| Failure::failed(errno.to_string(), "see the log"))?;
    out.result(&told_of(&report), || print!("{}", text_of(&report)));
    if report.left > 0 {
        out.step(format!(
            "{} names that were to be removed are there still: corbel pool repair finds them again",
            report.left
        ));
    }
    if report.lost > 0 {
        let what = format!("{} objects cannot be read", report.lost);
        return Err(Failure::new(Kind::Damaged, what, "bring the stores that are missing back"));
    }
    Ok(())
}

fn rows(report: &Report) -> [(&'static str, u64); 13] {
    [
        ("objects", report.objects),
        ("whole", report.whole),
        ("degraded", report.degraded),
        ("lost", report.lost),
        ("patches", report.patches),
        ("missing", report.missing),
        ("misplaced", report.misplaced),
        ("damaged", report.damaged),
        ("rebuilt", report.rebuilt),
        ("removed", report.removed),
        ("left", report.left),
        ("silent", report.silent),
        ("bytes", report.bytes),
    ]
}

fn told_of(report: &Report) -> Value {
    rows(report).into_iter().map(|(key, value)| (key.to_owned(), json!(value))).collect()
}

fn text_of(report: &Report) -> String {
    rows(report).iter().map(|(key, value)| format!("{key:<12}{value:>12}\n")).collect()
}
