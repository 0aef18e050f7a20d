#!/bin/sh
trap 'shutdown --no-wall -P now' EXIT
set -e
shutdown --no-wall -P +@minutes@
mkdir -p /var/lib/groupwise /var/lib/cloud/scripts/per-boot
echo @deadline@ @minutes@ > /var/lib/groupwise/end
cat > @arm@ <<'END_OF_FILE'
#!/bin/sh
set -e
if [ $# -eq 2 ]; then
    echo "$1" "$2" > /var/lib/groupwise/end.new
    mv /var/lib/groupwise/end.new /var/lib/groupwise/end
fi
read -r deadline minutes < /var/lib/groupwise/end || deadline=0
left=$(( (${deadline:-0} - $(date +%s) + 59) / 60 ))
[ "$left" -ge 0 ] || left=0
[ "$left" -le "${minutes:-0}" ] || left=${minutes:-0}
shutdown --no-wall -P +"$left"
END_OF_FILE
cat > /var/lib/cloud/scripts/per-boot/groupwise <<'END_OF_FILE'
#!/bin/sh
@arm@ || shutdown --no-wall -P now
@watch@
END_OF_FILE
chmod 755 @arm@ /var/lib/cloud/scripts/per-boot/groupwise
@notice@
/var/lib/cloud/scripts/per-boot/groupwise
python3 -c 'import ensurepip' || { apt-get update && apt-get -o DPkg::Lock::Timeout=120 install -y python3-venv; } || true
[ -f /etc/ssh/ssh_host_ed25519_key.pub ] || ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key
key=$(cut -d' ' -f1,2 /etc/ssh/ssh_host_ed25519_key.pub)
sum=$(printf %s "$key" | sha256sum | cut -c1-64)
print_key() { printf '\n<groupwise-host-key %s %s>\n' "$key" "$sum" >> /dev/console; }
print_key
trap - EXIT
set +e  # a job may have begun
for pause in 1 2 4; do
    sleep $pause
    print_key
done
