//! Notifications and the position, asked of a desktop's services on a private D-Bus.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{SystemTime, UNIX_EPOCH};

use openclaw_mcp_proxy::node::capabilities::location::{self, Location};
use openclaw_mcp_proxy::node::capabilities::system::System;
use openclaw_mcp_proxy::node::capabilities::{Args, Capability, Request, Response};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use zbus::connection::Builder;
use zbus::{Connection, Variant};

use crate::support::{soon, until};

/// A bus with a service that python-dbusmock stands for, and that logs what is asked of it.
struct Desktop {
    address: String,
    folder: PathBuf,
    control: Connection,
    processes: Vec<Child>,
}

impl Desktop {
    /// Starts a bus, and on it `mock`: the arguments of python-dbusmock that name the service.
    async fn start(name: &str, mock: &[&str]) -> Self {
        let folder = std::env::temp_dir().join(format!("openclaw-desktop-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut bus = Command::new("dbus-daemon")
            .args(["--session", "--nofork", "--nosyslog", "--print-address=1"])
            .arg(format!("--address=unix:dir={}", folder.display()))
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("dbus-daemon starts; install the package dbus-daemon");
        let mut address = String::new();
        BufReader::new(bus.stdout.take().unwrap()).read_line(&mut address).unwrap();
        let address = address.trim().to_owned();
        let service = Command::new("/usr/bin/python3")
            .args(["-m", "dbusmock", "--session", "--logfile"])
            .arg(folder.join("log"))
            .args(mock)
            .env("DBUS_SESSION_BUS_ADDRESS", &address)
            .spawn()
            .expect("Python starts; install the package python3-dbusmock");
        let control = Builder::address(&*address).build().await.unwrap();
        Desktop { address, folder, control, processes: vec![bus, service] }
    }

    /// Waits until somebody has the name.
    async fn has(&self, service: &str) {
        until(async || {
            let bus = "org.freedesktop.DBus";
            let owned = self.control.call_method(Some(bus), "/", Some(bus), "NameHasOwner", &service).await.unwrap();
            owned.body().deserialize::<bool>().unwrap()
        })
        .await;
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }
}

impl Drop for Desktop {
    fn drop(&mut self) {
        for process in self.processes.iter_mut().rev() {
            let _ended = process.kill();
            let _reaped = process.wait();
        }
        let _removed = std::fs::remove_dir_all(&self.folder);
    }
}

async fn call(capability: &impl Capability, command: &str, args: Value) -> Response {
    let request = Request { command: command.to_owned(), args: Args::new(args), session_key: None };
    soon(capability.execute(request, CancellationToken::new())).await
}

#[tokio::test]
async fn a_notification_reaches_the_desktop_as_it_was_said() {
    const SERVICE: &str = "org.freedesktop.Notifications";
    let desktop = Desktop::start("notify", &["--template", "notification_daemon"]).await;
    desktop.has(SERVICE).await;
    let system = System { session_bus: Some(desktop.address.clone()) };
    let title = "it's \"done\"";
    for (args, logged) in [
        (
            json!({ "title": title, "subtitle": "a", "body": "--help\n$(b)\0", "sound": false }),
            r#" Notify "OpenClaw" 0 "" "it's "done"" "a|--help|$(b)" [] {"suppress-sound": True} -1|"#,
        ),
        (json!({}), r#" Notify "OpenClaw" 0 "" "OpenClaw" "" [] {"sound-name": "message-new-instant"} -1|"#),
    ] {
        assert_eq!(call(&system, "system.notify", args).await, Response::done(json!({ "sent": true })));
        let log = desktop.log().replace('\n', "|");
        assert!(log.ends_with(logged), "{log}");
    }
}

const GEOCLUE: &str = "org.freedesktop.GeoClue2";
const MANAGER: &str = "/org/freedesktop/GeoClue2/Manager";
const CLIENT: &str = "/org/freedesktop/GeoClue2/Client/1";
const PLACE: &str = "/org/freedesktop/GeoClue2/Location/1";

/// Python that tells a client of its place, as GeoClue does once it has started.
const TELL: &str = r#"self.EmitSignal("", "LocationUpdated", "oo", ["/", "/org/freedesktop/GeoClue2/Location/1"])"#;

impl Desktop {
    /// Starts a bus with a GeoClue whose client does `on_start` when it is started, and whose place is of `seconds`.
    async fn with_geoclue(name: &str, on_start: &str, seconds: u64) -> Self {
        let desktop = Desktop::start(name, &[GEOCLUE, MANAGER, "org.freedesktop.GeoClue2.Manager"]).await;
        desktop.has(GEOCLUE).await;
        let return_client = format!("ret = dbus.ObjectPath('{CLIENT}')");
        desktop.mock(MANAGER, "AddMethod", &("", "GetClient", "", "o", return_client)).await;
        let client =
            HashMap::from([("DesktopId", Variant::from("")), ("RequestedAccuracyLevel", Variant::from(0_u32))]);
        let methods = vec![("Start", "", "", on_start)];
        desktop.mock(MANAGER, "AddObject", &(CLIENT, "org.freedesktop.GeoClue2.Client", client, methods)).await;
        let place = HashMap::from([
            ("Latitude", Variant::from(52.52)),
            ("Longitude", Variant::from(-13.4)),
            ("Accuracy", Variant::from(25.5)),
            ("Timestamp", Variant::from((seconds, 500_000_u64))),
        ]);
        let none: Vec<(&str, &str, &str, &str)> = Vec::new();
        desktop.mock(MANAGER, "AddObject", &(PLACE, "org.freedesktop.GeoClue2.Location", place, none)).await;
        desktop
    }

    async fn mock(&self, path: &str, method: &str, body: &(impl serde::Serialize + zbus::DynamicType)) {
        let mock = Some("org.freedesktop.DBus.Mock");
        self.control.call_method(Some(GEOCLUE), path, mock, method, body).await.unwrap();
    }

    fn location(&self) -> Location {
        Location::new(location::Options { system_bus: Some(self.address.clone()) })
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

#[tokio::test]
async fn a_position_is_found_and_serves_until_it_is_too_old() {
    let seconds = now();
    let desktop = Desktop::with_geoclue("location", TELL, seconds).await;
    let location = desktop.location();
    assert!(location.is_available("location.get"));
    let payload = json!({ "latitude": 52.52, "longitude": -13.4, "accuracy": 25.5, "timestamp": seconds * 1000 + 500 });
    let starts = || desktop.log().matches(" Start").count();
    for (args, searches, level) in [
        (json!({}), 1, "6"),
        (json!({ "maxAge": 60_000 }), 1, "6"),
        (json!({ "accuracy": "precise", "maxAge": 60_000 }), 2, "8"),
        (json!({ "maxAge": 60_000 }), 2, "8"),
    ] {
        assert_eq!(call(&location, "location.get", args.clone()).await, Response::done(payload.clone()), "{args}");
        assert_eq!(starts(), searches, "{args}");
        let log = desktop.log();
        let set = |name: &str| {
            log.lines().rfind(|line| line.contains(" Set ") && line.contains(name)).unwrap_or_default().to_owned()
        };
        assert!(set("DesktopId").contains("openclaw-node"), "{log}");
        assert!(set("RequestedAccuracyLevel").ends_with(level), "{log}");
    }
}

#[tokio::test]
async fn a_position_that_is_too_old_or_never_comes_is_a_failure() {
    let old = Desktop::with_geoclue("old", TELL, now() - 3600).await;
    let args = json!({ "maxAge": 60_000, "locationTimeout": 300 });
    assert_eq!(call(&old.location(), "location.get", args).await, Response::failed("Location failed"));
    let silent = Desktop::with_geoclue("silent", "pass", 0).await;
    let location = silent.location();
    let late = call(&location, "location.get", json!({ "locationTimeout": 100 })).await;
    assert_eq!(late, Response::failed("Location failed"));
    let cancel = CancellationToken::new();
    let request = Request { command: "location.get".to_owned(), ..Request::default() };
    let (cancelled, ()) = soon(async {
        tokio::join!(location.execute(request, cancel.clone()), async {
            until(async || silent.log().matches(" Start").count() == 2).await;
            cancel.cancel();
        })
    })
    .await;
    assert_eq!(cancelled, Response::failed("cancelled"));
}

#[tokio::test]
async fn whoever_may_not_know_the_position_hears_so() {
    let refuse = "raise dbus.exceptions.DBusException('canary', name='org.freedesktop.DBus.Error.AccessDenied')";
    let desktop = Desktop::with_geoclue("refused", refuse, 0).await;
    let refused = call(&desktop.location(), "location.get", json!({})).await;
    assert_eq!(refused, Response::failed("LOCATION_PERMISSION_REQUIRED"));
    let broken = Desktop::with_geoclue("broken", "raise ValueError('canary')", 0).await;
    assert_eq!(call(&broken.location(), "location.get", json!({})).await, Response::failed("Location failed"));
}

#[tokio::test]
async fn without_a_location_service_there_is_no_position() {
    let unavailable = Response::failed("Location not available");
    let desktop = Desktop::start("nowhere", &["org.example.Other", "/", "org.example.Other"]).await;
    assert_eq!(call(&desktop.location(), "location.get", json!({})).await, unavailable);
    let no_bus = Location::new(location::Options { system_bus: Some("unix:path=/no/such/bus".to_owned()) });
    assert_eq!(call(&no_bus, "location.get", json!({})).await, unavailable);
}
