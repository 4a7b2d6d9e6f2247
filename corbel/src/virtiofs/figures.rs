//! What each tenant may use and has used, for /metrics.

use std::net::SocketAddr;
use std::sync::Arc;

use ::virtiofs::device::Device;
use ::virtiofs::share::Member;

use super::Up;
use crate::metrics::{Exposition, MetricKind};

/// An address that only this machine reaches: what is said there is not for everybody, and there is no password.
pub(super) fn address(text: &str) -> Result<SocketAddr, String> {
    let address: SocketAddr = text.parse().map_err(|_| "not ADDRESS:PORT".to_owned())?;
    if address.ip().is_loopback() { Ok(address) } else { Err("not a loopback address".into()) }
}

/// Of one tenant.
pub(super) struct Figures {
    tenant: String,
    weight: u32,
    iops: Option<u64>,
    bandwidth: Option<u64>,
    device: Arc<Device>,
    member: Option<Member>,
}

impl Figures {
    /// None for a device that only passes requests on.
    pub(super) fn of(up: &Up) -> Option<Self> {
        Some(Self {
            tenant: up.args.tenant.clone(),
            weight: up.args.weight,
            iops: up.args.iops,
            bandwidth: up.args.bandwidth,
            device: up.device.clone()?,
            member: up.member.clone(),
        })
    }
}

/// The text of a scrape.
pub(super) fn text(all: &[Figures]) -> String {
    let mut out = Exposition::default();
    let mut add = |kind, said, value: &dyn Fn(&Figures) -> Option<f64>| {
        let values = all.iter().filter_map(|one| Some((one.tenant.clone(), value(one)?)));
        out.add_each(kind, said, "tenant", &values.collect::<Vec<_>>());
    };
    let limit = |limit: Option<u64>| limit.map(|limit| limit as f64);
    let gauge = MetricKind::Gauge;
    let weight = ("corbel_virtiofs_weight", "Its weight among the tenants of the process.");
    add(gauge, weight, &|one| one.member.as_ref().map(|_| one.weight.into()));
    let iops = ("corbel_virtiofs_iops_limit", "Operations a second that it may ask for.");
    add(gauge, iops, &|one| limit(one.iops));
    let bandwidth = ("corbel_virtiofs_bandwidth_limit", "Bytes a second that it may ask for.");
    add(gauge, bandwidth, &|one| limit(one.bandwidth));
    let used = ("corbel_virtiofs_used_seconds_total", "Time that its requests were charged for.");
    add(MetricKind::Counter, used, &|one| Some(one.member.as_ref()?.used().as_secs_f64()));
    let waited =
        ("corbel_virtiofs_waited_seconds_total", "Time that its threads waited for a place.");
    add(MetricKind::Counter, waited, &|one| Some(one.member.as_ref()?.waited().as_secs_f64()));
    let malformed = ("corbel_virtiofs_malformed_total", "Requests that could not be read.");
    add(MetricKind::Counter, malformed, &|one| Some(one.device.malformed() as f64));
    // What its server counts is `name value` lines. A name is said once, whoever of them has it.
    let stats: Vec<String> = all.iter().map(|one| one.device.stats_text()).collect();
    let pairs = |text: &'_ str| -> Vec<(String, f64)> {
        let pairs = text.lines().filter_map(|line| line.split_once(' '));
        pairs.filter_map(|(name, value)| Some((name.to_owned(), value.parse().ok()?))).collect()
    };
    let counted: Vec<Vec<(String, f64)>> = stats.iter().map(|text| pairs(text)).collect();
    let mut names: Vec<&String> = counted.iter().flatten().map(|(name, _)| name).collect();
    names.sort();
    names.dedup();
    for name in names {
        let of = |pairs: &Vec<(String, f64)>| {
            pairs.iter().find(|(other, _)| other == name).map(|(_, value)| *value)
        };
        let values = all.iter().zip(&counted);
        let values = values.filter_map(|(one, pairs)| Some((one.tenant.clone(), of(pairs)?)));
        let said = format!("corbel_virtiofs_{name}");
        let total = name.ends_with("_total");
        let kind = if total { MetricKind::Counter } else { MetricKind::Gauge };
        let values: Vec<_> = values.collect();
        out.add_each(kind, (&said, "Since its guest came."), "tenant", &values);
    }
    out.finish()
}

#[cfg(test)]
mod tests {
    use ::virtiofs::device::Options;
    use ::virtiofs::share::Share;
    use client::null::NullFs;

    use super::*;

    #[test]
    fn only_this_machine_is_told() {
        assert!(address("127.0.0.1:9472").is_ok() && address("[::1]:1").is_ok());
        for wrong in ["0.0.0.0:1", "10.1.2.3:80", "localhost", ""] {
            assert!(address(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn each_tenant_says_what_it_may_use() {
        let share = Share::new(1);
        let of = |tenant: &str, weight, iops| Figures {
            tenant: tenant.into(),
            weight,
            iops,
            bandwidth: None,
            device: Device::new(Arc::new(NullFs::default()), Options::default()),
            member: Some(share.join(weight)),
        };
        let said = text(&[of("one", 4, Some(500)), of("two", 1, None)]);
        for line in [
            "corbel_virtiofs_weight{tenant=\"one\"} 4",
            "corbel_virtiofs_weight{tenant=\"two\"} 1",
            "corbel_virtiofs_iops_limit{tenant=\"one\"} 500",
            "corbel_virtiofs_used_seconds_total{tenant=\"two\"} 0",
            "corbel_virtiofs_waited_seconds_total{tenant=\"two\"} 0",
        ] {
            assert!(said.lines().any(|other| other == line), "{line} in {said}");
        }
        assert!(!said.contains("iops_limit{tenant=\"two\"") && !said.contains("bandwidth"));
        let heads = said.lines().filter(|line| line.starts_with("# TYPE corbel_virtiofs_weight"));
        assert_eq!(heads.count(), 1);
    }
}
