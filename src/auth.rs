//! Bearer tokens: how they are kept, and the only place where they are compared.

use std::fmt;
use std::sync::{Mutex, PoisonError};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use http::HeaderMap;
use http::header::AUTHORIZATION;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// A secret from the settings. It has no `Display`, and its `Debug` says only whether it is set.
#[derive(Clone, Default, serde::Deserialize)]
#[serde(transparent)]
pub struct Token(String);

impl Token {
    /// Wraps a secret.
    pub fn new(secret: impl Into<String>) -> Self {
        Token(secret.into())
    }

    /// Whether no token is set: the seed's rule is that such an endpoint asks for none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The secret itself, to be sent to a server.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_empty() { "Token(none)" } else { "Token(***)" })
    }
}

/// Why a request is not let in. The texts are for its sender and never hold what was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Denied {
    /// No `Authorization: Bearer …`.
    #[error("A bearer token is missing: send 'Authorization: Bearer <token>'.")]
    Missing,
    /// Another token than the one expected.
    #[error("The bearer token is not valid for this endpoint.")]
    Invalid,
    /// The client sent the name of a variable instead of its value.
    #[error("The bearer token is a literal ${{…}}: the client did not expand a variable of its configuration.")]
    NotExpanded,
}

/// The SHA-256 of a token: all that is kept of it, and what is compared.
#[derive(Clone, Copy)]
pub struct TokenHash([u8; 32]);

impl TokenHash {
    /// The hash of a token. Hashing makes all equally long, so that a comparison tells nothing of the length.
    pub fn of(token: &[u8]) -> Self {
        TokenHash(Sha256::digest(token).into())
    }

    /// Reads 64 hexadecimal digits.
    pub fn parse(hex: &str) -> Option<Self> {
        let mut hash = [0; 32];
        if hex.len() != 64 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
            return None;
        }
        for (byte, at) in hash.iter_mut().zip((0..64).step_by(2)) {
            *byte = u8::from_str_radix(&hex[at..at + 2], 16).ok()?;
        }
        Some(TokenHash(hash))
    }

    /// Whether two are the same, in a time that does not tell where they differ.
    pub fn matches(&self, other: &Self) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl PartialEq for TokenHash {
    fn eq(&self, other: &Self) -> bool {
        self.matches(other)
    }
}

impl Eq for TokenHash {}

impl std::hash::Hash for TokenHash {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}

/// As 64 hexadecimal digits.
impl fmt::Display for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenHash(***)")
    }
}

/// A new token: 32 random bytes as 43 characters of URL-safe Base64.
///
/// # Errors
/// If the operating system has no random numbers.
pub fn new_token() -> std::io::Result<String> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
    Ok(URL_SAFE_NO_PAD.encode(bytes))
}

/// Why a token that is nobody's does not open anything.
pub fn denied(token: Option<&[u8]>) -> Denied {
    match token {
        None => Denied::Missing,
        Some(token) if token.starts_with(b"${") => Denied::NotExpanded,
        Some(_) => Denied::Invalid,
    }
}

/// What requests must present where there is one token.
#[derive(Debug, Clone)]
pub struct Guard {
    /// `None` lets everybody in.
    expected: Option<TokenHash>,
}

impl Guard {
    /// Demands `token`, or nothing if it is empty.
    pub fn new(token: &Token) -> Self {
        Guard { expected: (!token.is_empty()).then(|| TokenHash::of(token.0.as_bytes())) }
    }

    /// Whether everybody is let in.
    pub fn is_open(&self) -> bool {
        self.expected.is_none()
    }

    /// Checks a request's `Authorization` header.
    ///
    /// # Errors
    /// [`Denied`] if the token is missing or another one.
    pub fn check(&self, headers: &HeaderMap) -> Result<(), Denied> {
        let Some(expected) = &self.expected else { return Ok(()) };
        let token = bearer_token(headers);
        let is_it = token.is_some_and(|token| TokenHash::of(token).matches(expected));
        if is_it { Ok(()) } else { Err(denied(token)) }
    }
}

/// The token of `Authorization: Bearer <token>`; the scheme's case does not matter (RFC 9110 section 11.1).
pub fn bearer_token(headers: &HeaderMap) -> Option<&[u8]> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.as_bytes().split_at_checked(7)?;
    let token = token.trim_ascii();
    (scheme.eq_ignore_ascii_case(b"bearer ") && !token.is_empty()).then_some(token)
}

/// The token that a connection brought last, and its hash: most often it brings the same one again.
#[derive(Default)]
pub struct LastToken(Mutex<Option<(Box<[u8]>, TokenHash)>>);

impl LastToken {
    /// A longer token is hashed each time.
    const MAX_BYTES: usize = 256;

    /// The hash of `token`. Behind a reverse proxy a connection is several clients', so the comparison takes a time that
    /// does not tell where two tokens differ.
    pub fn hash(&self, token: &[u8]) -> TokenHash {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((last, hash)) = &*last
            && bool::from(last.ct_eq(token))
        {
            return *hash;
        }
        let hash = TokenHash::of(token);
        if token.len() <= Self::MAX_BYTES {
            *last = Some((token.into(), hash));
        }
        hash
    }
}

impl fmt::Debug for LastToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LastToken(***)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_that_changes_its_token_is_known_by_the_new_one() {
        let last = LastToken::default();
        let long = [b'x'; LastToken::MAX_BYTES + 1];
        for token in [&b"one"[..], b"one", b"two", b"one", b"", b"onetwo", &long, &long, b"one", &long[1..], &long] {
            assert!(last.hash(token).matches(&TokenHash::of(token)));
        }
        assert!(!format!("{last:?}").contains("one"));
    }

    #[test]
    fn a_token_never_shows_in_debug_output() {
        let token = Token::new("canary");
        assert!(!format!("{token:?} {:?}", Guard::new(&token)).contains("canary"));
    }

    #[test]
    fn only_the_exact_token_opens_a_guard() {
        let guard = Guard::new(&Token::new("secret"));
        let check = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(AUTHORIZATION, value.parse().unwrap());
            guard.check(&headers)
        };
        assert_eq!(guard.check(&HeaderMap::new()), Err(Denied::Missing));
        for good in ["Bearer secret", "bearer secret", "BEARER  secret "] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        for bad in ["Bearer secre", "Bearer secrets", "Bearer Secret"] {
            assert_eq!(check(bad), Err(Denied::Invalid), "{bad}");
        }
        for none in ["Bearer ", "Bearer", "secret", "Basic secret", ""] {
            assert_eq!(check(none), Err(Denied::Missing), "{none}");
        }
        assert_eq!(check("Bearer ${OPENCLAW_PROXY_OPENCLAW_TOKEN}"), Err(Denied::NotExpanded));
    }

    #[test]
    fn a_hash_is_written_and_read_as_hexadecimal_digits() {
        let hash = TokenHash::of(b"abc");
        assert_eq!(hash.to_string(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert!(TokenHash::parse(&hash.to_string().to_uppercase()).unwrap().matches(&hash));
        for bad in ["", "ba78", &hash.to_string()[1..], &hash.to_string().replace('b', "g"), &"ä".repeat(32)] {
            assert!(TokenHash::parse(bad).is_none(), "{bad}");
        }
        let tokens = [new_token().unwrap(), new_token().unwrap()];
        assert!(tokens[0] != tokens[1] && tokens.iter().all(|token| token.len() == 43));
    }

    #[test]
    fn an_empty_token_lets_everybody_in() {
        let guard = Guard::new(&Token::default());
        assert!(guard.is_open());
        assert_eq!(guard.check(&HeaderMap::new()), Ok(()));
    }
}
