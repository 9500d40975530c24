//! Certificates: whether clients take what a front shows, and for how much longer.

use std::sync::Arc;
use std::time::Duration;

use rustls::client::danger::ServerCertVerifier;
use rustls::pki_types::{ServerName, UnixTime};
use rustls::{CertificateError, ClientConfig, ClientConnection};
use rustls_platform_verifier::Verifier;

use super::explain::quote;
use super::finding::{Check, Finding, Fix};
use super::fixes;
use super::wire::{Base, Wire, WireError};

/// Less than this before its end, a certificate should have been renewed: those that live shortest are renewed with a
/// third of 90 days left.
const RENEWED_BEFORE: Duration = Duration::from_secs(14 * 24 * 3600);

/// TLS as apps and clients speak it, with the certificates that this machine trusts.
///
/// # Errors
/// A sentence, if there are none.
pub(super) fn config() -> Result<(Arc<ClientConfig>, Arc<Verifier>), String> {
    let unusable = |error: rustls::Error| format!("The system's certificates cannot be used: {error}.");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = Arc::new(Verifier::new(Arc::clone(&provider)).map_err(unusable)?);
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(unusable)?
        // The very verifier that would be taken without this word; it is also asked about the days to come.
        .dangerous()
        .with_custom_certificate_verifier(Arc::clone(&verifier) as Arc<dyn ServerCertVerifier>)
        .with_no_client_auth();
    // A bridge needs it, and so every front must offer it.
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok((Arc::new(config), verifier))
}

/// Makes a TLS session and looks at the certificate.
pub(super) async fn check(wire: &Wire, config: &Arc<ClientConfig>, verifier: &Verifier) -> Finding {
    let base = &wire.base;
    match wire.handshake(config).await {
        Ok(stream) => {
            let connection = stream.get_ref().1;
            match end_of_validity(connection, verifier, base) {
                None => {
                    let version = connection.protocol_version().and_then(|version| version.as_str()).unwrap_or("TLS");
                    Finding::ok(Check::Tls, format!("The certificate is valid for {}; {version}.", base.host()))
                }
                Some(end) => {
                    let message = format!("The certificate ends {end}: it should have been renewed by now.");
                    Finding::warning(Check::Tls, message, fixes::renew(&base.host()))
                }
            }
        }
        Err(WireError::Tls(error)) => {
            let refused = error.get_ref().and_then(|error| error.downcast_ref::<rustls::Error>());
            let (message, fixes) = in_words(refused, &error, base);
            Finding::problem(Check::Tls, message, fixes)
        }
        Err(error) => Finding::problem(Check::Tls, format!("There is no TLS: {error}."), fixes::tls()),
    }
}

/// When the certificate ends, if that is soon.
fn end_of_validity(connection: &ClientConnection, verifier: &Verifier, base: &Base) -> Option<String> {
    let (leaf, chain) = connection.peer_certificates()?.split_first()?;
    let name = ServerName::try_from(base.host()).ok()?;
    let then = UnixTime::since_unix_epoch(Duration::from_secs(UnixTime::now().as_secs()) + RENEWED_BEFORE);
    match verifier.verify_server_cert(leaf, chain, &name, &[], then) {
        Err(rustls::Error::InvalidCertificate(CertificateError::ExpiredContext { not_after, .. })) => {
            let left = not_after.as_secs().saturating_sub(UnixTime::now().as_secs());
            Some(match left / 3600 {
                hours @ ..48 => format!("in {hours} hours"),
                hours => format!("in {} days", hours / 24),
            })
        }
        Err(_) => Some("within 14 days".into()),
        Ok(_) => None,
    }
}

fn in_words(refused: Option<&rustls::Error>, error: &std::io::Error, base: &Base) -> (String, Vec<Fix>) {
    use CertificateError as Bad;
    let host = base.host();
    let days = |from: &UnixTime, to: &UnixTime| to.as_secs().saturating_sub(from.as_secs()) / (24 * 3600);
    match refused {
        Some(rustls::Error::InvalidCertificate(bad)) => match bad {
            Bad::ExpiredContext { time, not_after } => {
                let days = days(not_after, time);
                (format!("The certificate has expired, {days} days ago by this machine's clock."), fixes::renew(&host))
            }
            Bad::Expired => ("The certificate has expired.".into(), fixes::renew(&host)),
            Bad::NotValidYetContext { .. } | Bad::NotValidYet => (
                "The certificate is not valid yet: one of the two clocks is wrong.".into(),
                fixes::clock(),
            ),
            Bad::NotValidForNameContext { presented, .. } => {
                let names = presented.iter().take(5).map(|name| quote(name)).collect::<Vec<_>>().join(", ");
                (format!("The certificate is not for {host}, but for {names}."), fixes::certificate_name(&host))
            }
            Bad::NotValidForName => (format!("The certificate is not for {host}."), fixes::certificate_name(&host)),
            Bad::UnknownIssuer | Bad::Other(_) => (
                "The certificate comes from nobody whom this machine trusts: it signed itself, or the front shows it without the certificates between it and its authority.".into(),
                fixes::chain(&host),
            ),
            other => (format!("The certificate is not usable: {other}."), fixes::chain(&host)),
        },
        Some(rustls::Error::NoApplicationProtocol) => {
            ("The front does not offer HTTP/1.1, which a bridge needs.".into(), fixes::http11_offered())
        }
        Some(rustls::Error::PeerIncompatible(why)) => {
            (format!("The front speaks no TLS that is still in use: {why:?}."), fixes::tls())
        }
        _ => (format!("There is no TLS at this port, or it breaks off: {error}."), fixes::tls()),
    }
}
