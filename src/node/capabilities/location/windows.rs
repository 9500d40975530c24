//! Positions from Windows' location service, which knows whether its user lets programs know them.
//!
//! Not tested: it needs a Windows desktop with a location.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio_util::sync::CancellationToken;

use super::{NotFound, Options, Position, Wish};
use crate::node::capabilities::powershell;
use crate::node::capabilities::program::{self, Bounds, Exit};

/// How much longer than the search itself its program may take to start.
const START: Duration = Duration::from_secs(5);
/// The most bytes of an answer.
const OUTPUT: usize = 4096;
/// The code with which the script says that it may not know.
const REFUSED: i32 = 3;
/// Prints latitude, longitude, accuracy and milliseconds since 1970, one a line.
const SCRIPT: &str = r"
$ErrorActionPreference = 'Stop'
Add-Type -AssemblyName System.Device
$accuracy = [System.Device.Location.GeoPositionAccuracy]$env:OPENCLAW_ACCURACY
$watcher = New-Object System.Device.Location.GeoCoordinateWatcher $accuracy
$null = $watcher.TryStart($true, [TimeSpan]::FromMilliseconds(1000))
$end = [DateTime]::UtcNow.AddMilliseconds([double]$env:OPENCLAW_TIMEOUT)
while ($watcher.Position.Location.IsUnknown) {
    if ($watcher.Permission -eq 'Denied') { exit 3 }
    if ([DateTime]::UtcNow -gt $end) { exit 4 }
    Start-Sleep -Milliseconds 100
}
$found = $watcher.Position
$place = $found.Location
foreach ($number in $place.Latitude, $place.Longitude, $place.HorizontalAccuracy, $found.Timestamp.ToUnixTimeMilliseconds()) {
    [Console]::Out.WriteLine($number.ToString([Globalization.CultureInfo]::InvariantCulture))
}
";

/// Whether it could be asked.
pub(super) fn is_there(_: &Options) -> bool {
    powershell::is_there()
}

/// Asks it.
pub(super) async fn locate(_: &Options, wish: &Wish) -> Result<Position, NotFound> {
    let accuracy = if wish.is_precise { "High" } else { "Default" };
    let timeout = wish.timeout.as_millis().to_string();
    let values = [("OPENCLAW_ACCURACY", accuracy), ("OPENCLAW_TIMEOUT", &*timeout)];
    let command = powershell::command(SCRIPT, &values);
    let command = command.ok_or_else(|| NotFound::Unavailable("PowerShell is missing".to_owned()))?;
    let bounds = Bounds { time: wish.timeout + START, output: OUTPUT };
    // Dropped, when nobody waits for it any more.
    let ended = program::run(command, b"", bounds, &CancellationToken::new()).await;
    match &ended.exit {
        Exit::Code(Some(0)) => {}
        Exit::Code(Some(REFUSED)) => return Err(NotFound::Refused),
        other => return Err(NotFound::Failed(format!("PowerShell: {other:?}"))),
    }
    let answer = String::from_utf8_lossy(&ended.stdout.bytes);
    let numbers: Vec<f64> = answer.lines().filter_map(|line| line.trim().parse().ok()).collect();
    let [latitude, longitude, accuracy, time] = numbers[..] else {
        return Err(NotFound::Failed("PowerShell's answer is incomplete".to_owned()));
    };
    let time = Duration::try_from_secs_f64(time / 1000.0).ok().and_then(|since| UNIX_EPOCH.checked_add(since));
    let time = time.unwrap_or_else(SystemTime::now);
    Ok(Position { latitude, longitude, accuracy, time, is_precise: wish.is_precise })
}
