//! Positions from GeoClue, the location service of Linux desktops. It decides by its settings, and by asking the user,
//! who may know the position.

use std::collections::HashMap;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::StreamExt;
use serde::de::DeserializeOwned;
use zbus::message::Type as MessageType;
use zbus::{Connection, DynamicType, MatchRule, MessageStream, OwnedObjectPath, OwnedVariant, Type, Variant, fdo};

use super::{NotFound, Options, Position, Wish};
use crate::node::capabilities::dbus;

const SERVICE: &str = "org.freedesktop.GeoClue2";
const MANAGER_PATH: &str = "/org/freedesktop/GeoClue2/Manager";
const MANAGER: &str = "org.freedesktop.GeoClue2.Manager";
const CLIENT: &str = "org.freedesktop.GeoClue2.Client";
const LOCATION: &str = "org.freedesktop.GeoClue2.Location";
const PROPERTIES: &str = "org.freedesktop.DBus.Properties";
/// By this name its settings and its questions know this program.
const DESKTOP_ID: &str = "openclaw-node";
/// Its levels of accuracy.
const STREET: u32 = 6;
const EXACT: u32 = 8;
/// The file by which D-Bus starts it when it is asked for.
const SERVICE_FILE: &str = "/usr/share/dbus-1/system-services/org.freedesktop.GeoClue2.service";
/// Where the machine's bus listens, unless the environment says otherwise.
const SYSTEM_BUS: &str = "/run/dbus/system_bus_socket";
/// Its times may be cut to whole seconds.
const TIME_STEP: Duration = Duration::from_secs(1);

/// Whether it could be asked.
pub(super) fn is_there(options: &Options) -> bool {
    let has_bus = || std::env::var_os("DBUS_SYSTEM_BUS_ADDRESS").is_some() || Path::new(SYSTEM_BUS).exists();
    options.system_bus.is_some() || (Path::new(SERVICE_FILE).exists() && has_bus())
}

/// Asks it. It watches positions for a client until the client's connection ends.
pub(super) async fn locate(options: &Options, wish: &Wish) -> Result<Position, NotFound> {
    let bus = dbus::system(options.system_bus.as_deref()).await;
    let bus = bus.map_err(|error| NotFound::Unavailable(error.to_string()))?;
    let client: OwnedObjectPath = call(&bus, MANAGER_PATH, MANAGER, "GetClient", &()).await?;
    let accuracy = if wish.is_precise { EXACT } else { STREET };
    for (name, value) in [("DesktopId", Variant::from(DESKTOP_ID)), ("RequestedAccuracyLevel", Variant::from(accuracy))]
    {
        let () = call(&bus, &client, PROPERTIES, "Set", &(CLIENT, name, value)).await?;
    }
    let updates = MatchRule::builder().msg_type(MessageType::Signal).sender(SERVICE);
    let updates = updates.path(&client).interface(CLIENT).member("LocationUpdated").build()?;
    let mut updates = MessageStream::for_match_rule(updates, &bus, None).await?;
    let () = call(&bus, &client, CLIENT, "Start", &()).await?;
    loop {
        let Some(update) = updates.next().await.transpose()? else {
            return Err(NotFound::Failed("the bus has gone".to_owned()));
        };
        let (_, location): (OwnedObjectPath, OwnedObjectPath) = update.body().deserialize()?;
        let position = read(&bus, &location, wish).await?;
        // What it knew before comes first.
        if position.time + TIME_STEP >= wish.not_before {
            return Ok(position);
        }
    }
}

async fn read(bus: &Connection, location: &str, wish: &Wish) -> Result<Position, NotFound> {
    let mut members: HashMap<String, OwnedVariant> = call(bus, location, PROPERTIES, "GetAll", &LOCATION).await?;
    let number = |name: &str| {
        let number = members.get(name).and_then(|value| value.downcast_ref::<f64>().ok()).filter(|n| n.is_finite());
        number.ok_or_else(|| NotFound::Failed(format!("a location without {name}")))
    };
    let (latitude, longitude, accuracy) = (number("Latitude")?, number("Longitude")?, number("Accuracy")?);
    let time = members.remove("Timestamp").and_then(|time| <(u64, u64)>::try_from(time).ok());
    let time = time.filter(|(seconds, _)| *seconds > 0).and_then(|(seconds, micros)| {
        UNIX_EPOCH.checked_add(Duration::from_secs(seconds))?.checked_add(Duration::from_micros(micros))
    });
    let time = time.unwrap_or_else(SystemTime::now);
    Ok(Position { latitude, longitude, accuracy, time, is_precise: wish.is_precise })
}

async fn call<R: DeserializeOwned + Type>(
    bus: &Connection,
    path: &str,
    interface: &str,
    method: &str,
    body: &(impl serde::Serialize + DynamicType),
) -> Result<R, NotFound> {
    let reply = bus.call_method(Some(SERVICE), path, Some(interface), method, body).await?;
    Ok(reply.body().deserialize()?)
}

impl From<zbus::Error> for NotFound {
    fn from(error: zbus::Error) -> Self {
        match &error {
            zbus::Error::FDO(fault) => match **fault {
                fdo::Error::AccessDenied(_) => NotFound::Refused,
                fdo::Error::ServiceUnknown(_)
                | fdo::Error::NameHasNoOwner(_)
                | fdo::Error::SpawnExecFailed(_)
                | fdo::Error::SpawnFailed(_)
                | fdo::Error::SpawnServiceNotFound(_) => NotFound::Unavailable(error.to_string()),
                _ => NotFound::Failed(error.to_string()),
            },
            _ => NotFound::Failed(error.to_string()),
        }
    }
}
