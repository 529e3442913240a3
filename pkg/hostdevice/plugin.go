// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

// Package hostdevice is the CNI plugin amd-host-device: it gives a pod a NIC of the host together with the addresses
// that the NIC has there, and takes it back.
//
// ADD records what the NIC has, turns its addresses into a configuration of the static IPAM plugin, derives policy
// routes from them if the configuration asks for some ([policyroute]), and leaves the move to the host-device plugin. A
// chained sbr plugin finds the routes in the result. DEL and GC go by the record and by what the NIC is, never by the
// name that an interface has in a pod: they find it wherever it is, bring it home with one request, and restore it.
//
// Every step can be repeated, and the process may be killed at any of them: the record is on disk before the NIC moves
// and goes after the NIC is home, and calls for one NIC wait for each other, for orphaned sub-plugins too.
package hostdevice

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
	"gopkg.in/natefinch/lumberjack.v2"

	"github.com/cilium/networkdriver/pkg/nic"
	"github.com/cilium/networkdriver/pkg/nicowner"
)

// hostNetNS is the namespace that NICs come from and return to: the one that the runtime starts the plugin in.
const hostNetNS = "/proc/thread-self/ns/net"

// Name is the plugin's type in network configurations.
const Name = "amd-host-device"

// Versions are the versions of the CNI specification that the plugin speaks.
var Versions = version.PluginSupports("0.3.1", "0.4.0", "1.0.0", "1.1.0")

// The log file is replaced when it is this large, and old ones go.
const (
	logMaxMegabytes = 10
	logMaxBackups   = 3
)

// Plugin serves calls of the container runtime. It works in the network namespace that it is started in, which is the
// host's.
type Plugin struct {
	// Sysfs is the mount point of a sysfs that shows the host's namespace.
	Sysfs string
	// NodeConfig is the path of the file in which the node's administrator says what network configurations may do.
	NodeConfig string
	// Owners is where the node's programs say which NIC they have.
	Owners nicowner.Dir
	// Stderr gets the log.
	Stderr io.Writer
}

// New returns the plugin as runtimes call it.
func New() *Plugin {
	return &Plugin{Sysfs: "/sys", NodeConfig: DefaultNodeConfig, Owners: nicowner.Default, Stderr: os.Stderr}
}

// Funcs are the plugin's verbs. Their errors are CNI error objects.
func (p *Plugin) Funcs() skel.CNIFuncs {
	return skel.CNIFuncs{
		Add: p.verb("ADD", strict, func(ctx context.Context, c *call) error {
			result, err := c.add(ctx)
			if err != nil {
				return err
			}
			return types.PrintResult(result, c.conf.cniVersion)
		}),
		// An attachment must be possible to end whatever has become of its configuration.
		Del:    p.verb("DEL", lenient, func(ctx context.Context, c *call) error { return c.del(ctx) }),
		Check:  p.verb("CHECK", strict, func(ctx context.Context, c *call) error { return c.check(ctx) }),
		GC:     p.verb("GC", lenient, func(ctx context.Context, c *call) error { return c.gc(ctx) }),
		Status: p.verb("STATUS", strict, func(ctx context.Context, c *call) error { return c.status(ctx) }),
	}
}

const (
	strict  = true
	lenient = false
)

// call is one call of the runtime.
type call struct {
	args  *skel.CmdArgs
	conf  *config
	node  *nodeConfig
	sysfs string
	log   *slog.Logger
	store *store
	// owners keeps other programs of the node from the NICs that are recorded.
	owners nicowner.Dir
	boot   string
}

func (p *Plugin) verb(name string, strict bool, do func(context.Context, *call) error) func(*skel.CmdArgs) error {
	return func(args *skel.CmdArgs) error {
		c, done, err := p.newCall(name, strict, args)
		if err != nil {
			return asCNI(err)
		}
		defer done()
		if err = do(context.Background(), c); err != nil {
			c.log.Error("The call failed", "error", err)
		}
		return asCNI(err)
	}
}

// newCall reads what a call is about. done is to be called at its end.
func (p *Plugin) newCall(verb string, strict bool, args *skel.CmdArgs) (c *call, done func(), err error) {
	// code is for what keeps the plugin from working at all, which is what STATUS is asked for.
	code := types.ErrIOFailure
	if verb == "STATUS" {
		code = types.ErrPluginNotAvailable
	}
	node, err := readNodeConfig(p.NodeConfig)
	if err != nil {
		return nil, nil, errorf(code, "%w", err)
	}
	conf, err, invalid := parseConfig(args.StdinData, node)
	if err != nil {
		return nil, nil, err
	}
	if strict && invalid != nil {
		return nil, nil, invalid
	}
	done = func() {}
	out := p.Stderr
	if conf.logFile != "" {
		file := &lumberjack.Logger{Filename: conf.logFile, MaxSize: logMaxMegabytes, MaxBackups: logMaxBackups}
		out, done = io.MultiWriter(out, file), func() { _ = file.Close() }
	}
	log := slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{Level: conf.logLevel})).With("verb", verb, "network", conf.name)
	if args.ContainerID != "" {
		log = log.With("containerID", args.ContainerID, "interface", args.IfName)
	}
	if invalid != nil {
		log.Warn("Parts of the configuration are ignored", "error", invalid)
	}
	c = &call{args: args, conf: conf, node: node, sysfs: p.Sysfs, log: log, owners: p.Owners}
	if c.boot, err = bootID(); err == nil {
		c.store, err = openStore(node.StateDir)
	}
	if err != nil {
		done()
		return nil, nil, errorf(code, "state directory %s: %w", node.StateDir, err)
	}
	return c, done, nil
}

// attachment is the one that the call is about.
func (c *call) attachment() attachment { return attachment{c.args.ContainerID, c.args.IfName} }

func (c *call) openHost() (*nic.Place, error) {
	host, err := nic.Open(c.log, hostNetNS, c.sysfs)
	if err != nil {
		return nil, fmt.Errorf("host: %w", err)
	}
	return host, nil
}

// openPod opens the namespace of the container, which must not be the host's.
func (c *call) openPod(host *nic.Place) (*nic.Place, error) {
	pod, err := nic.Open(c.log, c.args.Netns, "")
	if err != nil {
		return nil, errorf(types.ErrInvalidNetNS, "namespace of the container: %w", err)
	}
	if pod.NS.ID == host.NS.ID {
		pod.Close()
		return nil, errorf(types.ErrInvalidNetNS, "namespace of the container: %s is the host's own", c.args.Netns)
	}
	return pod, nil
}

// exec runs sub-plugins, which inherit the file of a lock if one is given.
func (c *call) exec(lock *os.File) executor { return executor{path: c.args.Path, file: lock} }

// holder returns the record of the attachment that a NIC was recorded for last, nil if there is none.
func (c *call) holder(is func(nic.Identity) bool) (*record, error) {
	records, broken, err := c.store.list()
	if err != nil {
		return nil, err
	}
	for _, err := range broken {
		c.log.Warn("A record cannot be read", "error", err)
	}
	var newest *record
	for _, r := range records {
		if is(r.NIC) && (newest == nil || r.Recorded > newest.Recorded) {
			newest = r
		}
	}
	return newest, nil
}

// ipam calls the IPAM plugin of the user, if there is one; the plugin's own needs no calls but ADD.
func (c *call) ipam(ctx context.Context, verb string) error {
	if c.conf.ipamType == "" {
		return nil
	}
	conf, err := c.conf.forSubPlugin("", nil)
	if err == nil {
		_, err = c.exec(nil).run(ctx, verb, c.conf.ipamType, conf)
	}
	return err
}

// status says what keeps the plugin from serving.
func (c *call) status(ctx context.Context) error {
	var errs []error
	if err := c.store.writable(); err != nil {
		errs = append(errs, fmt.Errorf("the state directory %s is not writable: %w", c.node.StateDir, err))
	}
	plugins := []string{subPlugin, staticIPAM}
	if c.conf.ipamType != "" {
		plugins[1] = c.conf.ipamType
	}
	for _, plugin := range plugins {
		if _, err := c.exec(nil).find(plugin); err != nil {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return errorf(types.ErrPluginNotAvailable, "%w", err)
	}
	conf, err := c.conf.forSubPlugin("", nil)
	if err != nil {
		return err
	}
	_, err = c.exec(nil).run(ctx, "STATUS", subPlugin, conf)
	return err
}
