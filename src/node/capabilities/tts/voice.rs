//! The programs that turn a text into sound.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use super::Options;
use crate::node::capabilities::program::{self, Bounds};

/// How long turning the longest text into sound may take.
const RENDER_TIMEOUT: Duration = Duration::from_secs(120);
/// What is kept of the complaints of a program.
const OUTPUT: usize = 4096;
/// The most characters of the name of a voice.
const MAX_NAME: usize = 100;

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Provider {
    /// Neural voices on this machine.
    Piper,
    /// What the system has; if anything can speak, it can.
    System,
    /// A service in the cloud, which this node has no key for.
    ElevenLabs,
}

impl Provider {
    pub(super) const ALL: [Provider; 3] = [Provider::Piper, Provider::System, Provider::ElevenLabs];

    pub(super) fn name(self) -> &'static str {
        match self {
            Provider::Piper => "piper",
            Provider::System => system::NAME,
            Provider::ElevenLabs => "elevenlabs",
        }
    }

    pub(super) fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|provider| provider.name().eq_ignore_ascii_case(name.trim()))
    }

    pub(super) fn readiness(self, options: &Options) -> Readiness {
        match self {
            Provider::Piper if piper(options).is_none() => Readiness::Unavailable,
            Provider::Piper => match &options.piper_voice {
                None => Readiness::NeedsVoice,
                Some(voice) if voice.is_file() => Readiness::Ready,
                Some(_) => Readiness::VoiceNotDownloaded,
            },
            Provider::System if system::is_there() => Readiness::Ready,
            Provider::System => Readiness::Unavailable,
            Provider::ElevenLabs => Readiness::NeedsApiKey,
        }
    }

    /// Turns `text` into the WAV file `file`.
    ///
    /// # Errors
    /// What went wrong, without what was said.
    pub(super) async fn render(
        self,
        options: &Options,
        text: &str,
        voice: Option<&str>,
        file: &Path,
    ) -> Result<(), String> {
        let (command, text) = match self {
            // It makes a file for each line, all of them of the same name.
            Provider::Piper => {
                (piper_command(options, voice, file), text.split_whitespace().collect::<Vec<_>>().join(" "))
            }
            Provider::System => (system::command(voice, file), text.to_owned()),
            Provider::ElevenLabs => (None, String::new()),
        };
        let command = command.ok_or("there is no such program or voice")?;
        let bounds = Bounds { time: RENDER_TIMEOUT, output: OUTPUT };
        // Dropped, when nobody wants to hear it any more.
        let ended = program::run(command, text.as_bytes(), bounds, &CancellationToken::new()).await;
        if ended.is_success() { Ok(()) } else { Err(format!("the program ended with {:?}", ended.exit)) }
    }
}

/// Whether a provider can speak.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Readiness {
    Ready,
    NeedsApiKey,
    NeedsVoice,
    VoiceNotDownloaded,
    Unavailable,
}

impl Readiness {
    pub(super) fn name(self) -> &'static str {
        match self {
            Readiness::Ready => "ready",
            Readiness::NeedsApiKey => "needs-api-key",
            Readiness::NeedsVoice => "needs-voice",
            Readiness::VoiceNotDownloaded => "voice-not-downloaded",
            Readiness::Unavailable => "unavailable",
        }
    }
}

/// Whether a text can be the name of a voice or a model, and neither a flag nor a path.
pub(super) fn is_name(text: &str) -> bool {
    let is_inside = |c: char| c.is_alphanumeric() || "_-.+() ".contains(c);
    text.starts_with(char::is_alphanumeric) && text.chars().count() <= MAX_NAME && text.chars().all(is_inside)
}

fn piper(options: &Options) -> Option<PathBuf> {
    match &options.piper {
        Some(piper) => program::is_program(piper).then(|| piper.clone()),
        None => program::find("piper"),
    }
}

fn piper_command(options: &Options, voice: Option<&str>, file: &Path) -> Option<Command> {
    let own = options.piper_voice.as_deref()?;
    // Other voices lie beside it.
    let model = match voice {
        Some(voice) => own.with_file_name(format!("{voice}.onnx")),
        None => own.to_owned(),
    };
    let mut command = Command::new(piper(options)?);
    command.arg("--model").arg(model.is_file().then_some(model)?).arg("--output_file").arg(file);
    Some(command)
}

#[cfg(all(unix, not(target_os = "macos")))]
mod system {
    use super::*;

    pub(super) const NAME: &str = "espeak";

    pub(super) fn is_there() -> bool {
        espeak().is_some()
    }

    fn espeak() -> Option<PathBuf> {
        program::find("espeak-ng").or_else(|| program::find("espeak"))
    }

    pub(super) fn command(voice: Option<&str>, file: &Path) -> Option<Command> {
        let mut command = Command::new(espeak()?);
        // The text is UTF-8.
        command.args(["--stdin", "-b", "1", "-w"]).arg(file);
        if let Some(voice) = voice {
            command.args(["-v", voice]);
        }
        Some(command)
    }
}

#[cfg(target_os = "macos")]
mod system {
    use super::*;

    pub(super) const NAME: &str = "say";

    pub(super) fn is_there() -> bool {
        program::find("say").is_some()
    }

    pub(super) fn command(voice: Option<&str>, file: &Path) -> Option<Command> {
        let mut command = Command::new(program::find("say")?);
        command.args(["--file-format=WAVE", "--data-format=LEI16@22050", "-f", "-", "-o"]).arg(file);
        if let Some(voice) = voice {
            command.args(["-v", voice]);
        }
        Some(command)
    }
}

/// The voices of Windows. Not tested: it needs a Windows desktop.
#[cfg(windows)]
mod system {
    use super::*;
    use crate::node::capabilities::powershell;

    pub(super) const NAME: &str = "windows";

    const SCRIPT: &str = r"
$ErrorActionPreference = 'Stop'
Add-Type -AssemblyName System.Speech
$text = (New-Object IO.StreamReader ([Console]::OpenStandardInput()), ([Text.Encoding]::UTF8)).ReadToEnd()
$synthesizer = New-Object System.Speech.Synthesis.SpeechSynthesizer
if ($env:OPENCLAW_VOICE) { $synthesizer.SelectVoice($env:OPENCLAW_VOICE) }
$synthesizer.SetOutputToWaveFile($env:OPENCLAW_FILE)
$synthesizer.Speak($text)
$synthesizer.Dispose()
";

    pub(super) fn is_there() -> bool {
        powershell::is_there()
    }

    pub(super) fn command(voice: Option<&str>, file: &Path) -> Option<Command> {
        let values = [("OPENCLAW_VOICE", voice.unwrap_or_default()), ("OPENCLAW_FILE", file.to_str()?)];
        powershell::command(SCRIPT, &values)
    }
}
