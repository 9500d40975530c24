//! `device.*`: what this device is, and how it is.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::BoxFuture;
use serde_json::{Map, Value, json};
use sysinfo::{Disks, IpNetwork, MINIMUM_CPU_UPDATE_INTERVAL, MemoryRefreshKind, Networks, Product, System};
use tokio_util::sync::CancellationToken;

use super::{Args, Capability, Request, Response};

/// The commands, in the order in which they are listed.
const COMMANDS: [&str; 2] = ["device.info", "device.status"];
/// What can be asked for.
const SECTIONS: [&str; 5] = ["os", "cpu", "memory", "disk", "battery"];
/// How long one section may take: a dead network drive never answers.
const SECTION_TIMEOUT: Duration = Duration::from_secs(5);

/// The capability.
#[derive(Debug, Default)]
pub struct Device;

impl Capability for Device {
    fn category(&self) -> &str {
        "device"
    }

    fn commands(&self) -> Vec<&str> {
        COMMANDS.to_vec()
    }

    fn input_schema(&self, command: &str) -> Option<Value> {
        let properties = match command {
            "device.info" => json!({}),
            "device.status" => json!({
                "sections": {
                    "type": "array",
                    "items": { "type": "string", "enum": SECTIONS },
                    "description": "What to collect; everything, if it is left out",
                },
            }),
            _ => return None,
        };
        Some(json!({ "type": "object", "properties": properties, "additionalProperties": true }))
    }

    fn execute(&self, request: Request, _: CancellationToken) -> BoxFuture<'_, Response> {
        Box::pin(async move {
            match &*request.command {
                "device.info" => Response::done(collect(info).await),
                "device.status" => status(&request.args).await,
                other => Response::unknown_command(other),
            }
        })
    }
}

/// The fixed facts.
fn info() -> Value {
    json!({
        "deviceName": System::host_name().unwrap_or_default(),
        "modelIdentifier": Product::name().unwrap_or_default(),
        "systemName": System::name().unwrap_or_else(|| std::env::consts::OS.to_owned()),
        "systemVersion": System::os_version().or_else(System::kernel_version).unwrap_or_default(),
        "appVersion": env!("CARGO_PKG_VERSION"),
        "appBuild": if cfg!(debug_assertions) { "debug" } else { "release" },
        "locale": own_locale(),
    })
}

#[cfg(windows)]
fn own_locale() -> String {
    sys_locale::get_locale().unwrap_or_else(|| "und".to_owned())
}

#[cfg(not(windows))]
fn own_locale() -> String {
    locale(|name| std::env::var(name).ok())
}

/// The language tag of the POSIX locale, or `und` if none is set.
#[cfg(any(not(windows), test))]
fn locale(env: impl Fn(&str) -> Option<String>) -> String {
    let set = ["LC_ALL", "LC_MESSAGES", "LANG"].into_iter().filter_map(env).find(|value| !value.is_empty());
    let set = set.unwrap_or_default();
    match set.split(['.', '@']).next().unwrap_or_default() {
        "" | "C" | "POSIX" => "und".to_owned(),
        name => name.replace('_', "-"),
    }
}

async fn status(args: &Args) -> Response {
    let wanted: Vec<String> = args.strings("sections").into_iter().map(str::to_ascii_lowercase).collect();
    let unknown: Vec<&str> = wanted.iter().map(String::as_str).filter(|name| !SECTIONS.contains(name)).collect();
    if !unknown.is_empty() {
        let valid = SECTIONS.join(", ");
        return Response::failed(format!("Unknown sections: {}. Valid sections: {valid}", unknown.join(", ")));
    }
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|section| section == name);
    let mut status = Map::new();
    status.insert("collectedAt".to_owned(), timestamp(SystemTime::now()).into());
    for (name, collector) in [("os", os as fn() -> Value), ("cpu", cpu), ("memory", memory), ("disk", disk)] {
        if is_wanted(name) {
            status.insert(name.to_owned(), collect(collector).await);
        }
    }
    // Older clients read these whatever they ask for.
    for (name, collector) in [("battery", battery as fn() -> Value), ("storage", storage), ("network", network)] {
        status.insert(name.to_owned(), collect(collector).await);
    }
    status.insert("thermal".to_owned(), json!({ "state": "nominal" }));
    status.insert("uptimeSeconds".to_owned(), System::uptime().into());
    Response::done(Value::Object(status))
}

/// Collects something on a thread where it may block. What fails spoils nothing else.
async fn collect(collector: impl FnOnce() -> Value + Send + 'static) -> Value {
    match tokio::time::timeout(SECTION_TIMEOUT, tokio::task::spawn_blocking(collector)).await {
        Ok(Ok(value)) => value,
        _ => json!({ "error": "collection failed" }),
    }
}

fn os() -> Value {
    json!({
        "version": System::long_os_version().unwrap_or_default(),
        "architecture": System::cpu_arch(),
        "machineName": System::host_name().unwrap_or_default(),
        "uptimeSeconds": System::uptime(),
    })
}

fn cpu() -> Value {
    let mut system = System::new();
    system.refresh_cpu_usage();
    // Usage is the difference of two looks.
    std::thread::sleep(MINIMUM_CPU_UPDATE_INTERVAL);
    system.refresh_cpu_usage();
    let usage = f64::from(system.global_cpu_usage());
    json!({
        "name": system.cpus().first().map(|cpu| cpu.brand().trim()).unwrap_or_default(),
        "logicalProcessors": system.cpus().len(),
        "usagePercent": usage.is_finite().then(|| rounded(usage)),
    })
}

fn memory() -> Value {
    let mut system = System::new();
    system.refresh_memory_specifics(MemoryRefreshKind::nothing().with_ram());
    let (total, available) = (system.total_memory(), system.available_memory());
    json!({ "totalBytes": total, "availableBytes": available, "usagePercent": used_percent(total, available) })
}

fn disk() -> Value {
    let disks = Disks::new_with_refreshed_list();
    let drives = disks.iter().filter(|disk| disk.total_space() > 0).map(|disk| {
        let (total, free) = (disk.total_space(), disk.available_space());
        json!({
            "name": disk.mount_point().display().to_string(),
            "label": disk.name().to_string_lossy(),
            "totalBytes": total,
            "freeBytes": free,
            "usagePercent": used_percent(total, free),
            "format": disk.file_system().to_string_lossy(),
        })
    });
    json!({ "drives": drives.collect::<Vec<_>>() })
}

/// The drive that the system is on, else the largest.
fn storage() -> Value {
    let disks = Disks::new_with_refreshed_list();
    let home = std::env::var("SystemDrive").map_or_else(|_| "/".to_owned(), |drive| format!("{drive}\\"));
    let system = disks.iter().find(|disk| disk.mount_point() == Path::new(&home));
    let found = system.or_else(|| disks.iter().max_by_key(|disk| disk.total_space()));
    let (total, free) = found.map_or((0, 0), |disk| (disk.total_space(), disk.available_space()));
    json!({ "totalBytes": total, "freeBytes": free, "usedBytes": total.saturating_sub(free) })
}

fn network() -> Value {
    let networks = Networks::new_with_refreshed_list();
    let leads_out = |network: &IpNetwork| match network.addr {
        std::net::IpAddr::V4(ip) => !ip.is_loopback() && !ip.is_link_local() && !ip.is_unspecified(),
        std::net::IpAddr::V6(ip) => !ip.is_loopback() && !ip.is_unicast_link_local() && !ip.is_unspecified(),
    };
    let connected = networks.iter().filter(|(_, data)| data.ip_networks().iter().any(leads_out));
    let kinds: BTreeSet<&str> = connected.map(|(name, _)| interface_kind(name)).collect();
    json!({
        "status": if kinds.is_empty() { "unsatisfied" } else { "satisfied" },
        "isExpensive": !kinds.is_empty() && kinds.iter().all(|kind| *kind == "cellular"),
        "isConstrained": false,
        "interfaces": kinds,
    })
}

/// What an interface's name says of it: predictable names on Linux, plain words on Windows.
fn interface_kind(name: &str) -> &'static str {
    let name = name.to_ascii_lowercase();
    let starts = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
    if starts(&["wl", "wi-fi", "wifi"]) {
        "wifi"
    } else if starts(&["ww", "cellular", "mobile", "rmnet"]) {
        "cellular"
    } else if starts(&["eth", "en"]) {
        "wired"
    } else {
        "other"
    }
}

fn battery() -> Value {
    let mut battery = battery_in(Path::new("/sys/class/power_supply"));
    if cfg!(not(target_os = "linux")) {
        battery["present"] = Value::Null;
        battery["error"] = "it cannot be read on this system".into();
    }
    battery
}

/// The first battery that Linux tells of in `folder`.
fn battery_in(folder: &Path) -> Value {
    let supplies = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let read =
        |supply: &Path, name: &str| std::fs::read_to_string(supply.join(name)).ok().map(|text| text.trim().to_owned());
    let mut batteries: Vec<_> = supplies
        // A mouse has a battery, too, but its scope is its own.
        .filter(|supply| {
            read(supply, "type").as_deref() == Some("Battery") && read(supply, "scope").as_deref() != Some("Device")
        })
        .collect();
    batteries.sort();
    let battery = batteries.first();
    let number = |name: &str| battery.and_then(|supply| read(supply, name)?.parse::<f64>().ok());
    let state = match battery.and_then(|supply| read(supply, "status")).as_deref() {
        Some("Charging" | "Full") => "charging",
        Some("Discharging") => "discharging",
        _ => "unknown",
    };
    let percent = number("capacity").map(|percent| percent.clamp(0.0, 100.0));
    let left = number("energy_now").or_else(|| number("charge_now"));
    let rate = number("power_now").or_else(|| number("current_now")).map(f64::abs).filter(|rate| *rate > 0.0);
    let minutes = left.zip(rate).filter(|_| state == "discharging").map(|(left, rate)| (left / rate * 60.0).round());
    json!({
        "present": battery.is_some(),
        "level": percent.map(|percent| percent / 100.0),
        "chargePercent": percent,
        "state": state,
        "isCharging": state == "charging",
        "estimatedMinutesRemaining": minutes,
        "lowPowerModeEnabled": false,
        "error": null,
    })
}

#[expect(clippy::cast_precision_loss, reason = "a percentage needs no more")]
fn used_percent(total: u64, free: u64) -> f64 {
    if total == 0 { 0.0 } else { rounded(total.saturating_sub(free) as f64 / total as f64 * 100.0) }
}

fn rounded(percent: f64) -> f64 {
    (percent * 10.0).round() / 10.0
}

/// ISO 8601 in UTC, to the second.
fn timestamp(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    // Counted from 0000-03-01, every 400 years have the same number of days, and a leap day ends its year.
    let day = days + 719_468;
    let (era, day) = (day / 146_097, day % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (year, month) = if month < 10 { (year, month + 3) } else { (year + 1, month - 9) };
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!("{:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z", year + 400 * era)
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn run(command: &str, args: Value) -> Response {
        let request = Request { command: command.to_owned(), args: Args::new(args), session_key: None };
        Device.execute(request, CancellationToken::new()).await
    }

    async fn payload(command: &str, args: Value) -> Value {
        match run(command, args).await {
            Response::Done { payload, .. } => payload,
            Response::Failed(error) => panic!("{error}"),
        }
    }

    fn keys(value: &Value) -> Vec<&str> {
        value.as_object().unwrap_or_else(|| panic!("{value}")).keys().map(String::as_str).collect()
    }

    #[tokio::test]
    async fn the_facts_are_all_there() {
        let info = payload("device.info", Value::Null).await;
        let expected =
            ["appBuild", "appVersion", "deviceName", "locale", "modelIdentifier", "systemName", "systemVersion"];
        assert_eq!(keys(&info), expected);
        assert!(info.as_object().unwrap().values().all(Value::is_string));
        assert!(!info["systemName"].as_str().unwrap().is_empty());
        assert!(cfg!(not(windows)) || info["locale"] != "und", "Windows always has one");
    }

    #[tokio::test]
    async fn sections_are_chosen_and_older_members_always_there() {
        const ALWAYS: [&str; 6] = ["battery", "collectedAt", "network", "storage", "thermal", "uptimeSeconds"];
        let with = |more: &[&'static str]| {
            let mut names = [&ALWAYS[..], more].concat();
            names.sort_unstable();
            names
        };
        for (args, more) in [
            (json!({}), &["os", "cpu", "memory", "disk"][..]),
            (json!({ "sections": [] }), &["os", "cpu", "memory", "disk"]),
            (json!({ "sections": ["OS", "memory"] }), &["os", "memory"]),
            (json!({ "sections": ["battery"] }), &[]),
        ] {
            assert_eq!(keys(&payload("device.status", args).await), with(more));
        }
        let error = "Unknown sections: gpu, x. Valid sections: os, cpu, memory, disk, battery";
        assert_eq!(run("device.status", json!({ "sections": ["os", "GPU", "x"] })).await, Response::failed(error));
    }

    #[tokio::test]
    async fn the_figures_are_plausible() {
        let status = payload("device.status", Value::Null).await;
        let positive = |value: &Value| value.as_u64().is_some_and(|number| number > 0);
        let percent = |value: &Value| value.as_f64().is_some_and(|number| (0.0..=100.0).contains(&number));
        assert!(positive(&status["memory"]["totalBytes"]) && percent(&status["memory"]["usagePercent"]), "{status}");
        assert!(positive(&status["cpu"]["logicalProcessors"]) && percent(&status["cpu"]["usagePercent"]), "{status}");
        assert_eq!(keys(&status["os"]), ["architecture", "machineName", "uptimeSeconds", "version"]);
        assert!(status["disk"]["drives"].is_array() && status["storage"]["totalBytes"].is_u64(), "{status}");
        assert!(["satisfied", "unsatisfied"].contains(&status["network"]["status"].as_str().unwrap()));
        assert!(["charging", "discharging", "unknown"].contains(&status["battery"]["state"].as_str().unwrap()));
        assert_eq!(status["battery"]["error"].is_null(), cfg!(target_os = "linux"));
        assert_eq!(status["thermal"]["state"], "nominal");
    }

    #[tokio::test]
    async fn a_section_that_fails_spoils_nothing_else() {
        let failed = json!({ "error": "collection failed" });
        assert_eq!(collect(|| panic!("no such sensor")).await, failed);
    }

    #[test]
    fn a_battery_is_read_as_the_kernel_tells_of_it() {
        let root = std::env::temp_dir().join(format!("openclaw-battery-{}", std::process::id()));
        assert_eq!(battery_in(&root)["present"], false);
        let write = |supply: &str, pairs: &[(&str, &str)]| {
            std::fs::create_dir_all(root.join(supply)).unwrap();
            for (name, text) in pairs {
                std::fs::write(root.join(supply).join(name), format!("{text}\n")).unwrap();
            }
        };
        write("AC", &[("type", "Mains"), ("online", "0")]);
        write("A-mouse", &[("type", "Battery"), ("scope", "Device"), ("capacity", "5")]);
        write(
            "BAT0",
            &[
                ("type", "Battery"),
                ("capacity", "80"),
                ("status", "Discharging"),
                ("energy_now", "40000000"),
                ("power_now", "10000000"),
            ],
        );
        let battery = battery_in(&root);
        std::fs::remove_dir_all(&root).unwrap();
        let expected = json!({ "present": true, "level": 0.8, "chargePercent": 80.0, "state": "discharging", "isCharging": false,
            "estimatedMinutesRemaining": 240.0, "lowPowerModeEnabled": false, "error": null });
        assert_eq!(battery, expected);
    }

    #[test]
    fn interfaces_locales_and_times_are_named_as_clients_expect() {
        let kinds = ["wlp3s0", "Wi-Fi", "enp0s1", "eth0", "Ethernet 2", "wwan0", "docker0"].map(interface_kind);
        assert_eq!(kinds, ["wifi", "wifi", "wired", "wired", "wired", "cellular", "other"]);
        let locale = |value: &str| super::locale(|name| (name == "LANG").then(|| value.to_owned()));
        assert_eq!(["de_DE.UTF-8", "sr_RS@latin", "C.UTF-8", ""].map(locale), ["de-DE", "sr-RS", "und", "und"]);
        let at = |seconds| timestamp(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(
            [0, 951_782_400, 1_709_251_199, 4_102_444_800].map(at),
            ["1970-01-01T00:00:00Z", "2000-02-29T00:00:00Z", "2024-02-29T23:59:59Z", "2100-01-01T00:00:00Z"]
        );
    }
}
