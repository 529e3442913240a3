// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package types

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"

	"github.com/cilium/networkdriver/pkg/nic"
)

// MaxVLAN is the highest VLAN id (IEEE 802.1Q; 4095 is reserved).
const MaxVLAN = 4094

// DriverVFIO is the kernel driver that hands a VF to a program, the only one that can be asked for.
const DriverVFIO = "vfio-pci"

// parameterNames are the names of the opaque parameters.
var parameterNames = []string{"addresses", "driver", "network", "podIfName", "rdma", "routes", "vhost", "vlan"}

// DeviceConfig is what a claim asks of one device: the opaque parameters of the driver in a claim or device class, and
// what the network that they name was when the device was prepared.
type DeviceConfig struct {
	// PodIfName is the name of the interface in the pod. Empty: the interface keeps its name on the host.
	PodIfName string `json:"podIfName,omitempty"`
	// Vlan is the VLAN id that the PF tags and filters the VF's frames with, 0 for none. Nil: not asked for,
	// which means none too, and may be said by another configuration of the same request.
	Vlan *int `json:"vlan,omitempty"`
	// Network is the name of the network to join. It goes with no vlan, which the network says. Empty: none.
	Network string `json:"network,omitempty"`
	// Driver is the kernel driver to bind to a VF while it is the claim's: [DriverVFIO]. Empty: the one that it has.
	Driver string `json:"driver,omitempty"`
	// Vhost gives a program that drives the VF itself a way into its pod's kernel, vhost-net and TUN/TAP, too.
	Vhost bool `json:"vhost,omitempty"`
	// RDMA gives programs the RDMA device of the VF's interface.
	RDMA bool `json:"rdma,omitempty"`
	// Addresses are certain ones of the network, one of each family at most, or, without a network, those that the device gets.
	Addresses []Address `json:"addresses,omitempty"`
	// Routes are those to set in the pod for a device of no network, beside those to the addresses' subnets.
	Routes []Route `json:"routes,omitempty"`
	// Joined is the network of that name; nil for none, and until it has been looked up. No parameter sets it.
	Joined *Network `json:"joined,omitempty"`
}

// VLAN returns the VLAN id to configure, 0 for none.
func (c DeviceConfig) VLAN() int { return c.Tag().VLAN }

// Asked returns the configuration without what was looked up for it.
func (c DeviceConfig) Asked() DeviceConfig {
	c.Joined = nil
	return c
}

// Check refuses what no device can have been prepared for. The error begins with the field's name.
func (c DeviceConfig) Check() error {
	if c.Vlan != nil && (*c.Vlan < 0 || *c.Vlan > MaxVLAN) {
		return fmt.Errorf("vlan: %d is not in 0..%d", *c.Vlan, MaxVLAN)
	}
	if err := c.checkDriver(); err != nil {
		return err
	}
	if err := c.checkNetwork(); err != nil {
		return err
	}
	if c.PodIfName != "" {
		if err := ValidatePodIfName(c.PodIfName); err != nil {
			return fmt.Errorf("podIfName: %w", err)
		}
	}
	return c.CheckTogether()
}

// IsZero says whether nothing is asked for.
func (c DeviceConfig) IsZero() bool { return reflect.DeepEqual(c, DeviceConfig{}) }

// Override returns the configuration with every parameter that other sets taken from other.
func (c DeviceConfig) Override(other DeviceConfig) DeviceConfig {
	if other.PodIfName != "" {
		c.PodIfName = other.PodIfName
	}
	if other.Vlan != nil {
		c.Vlan = other.Vlan
	}
	if other.Network != "" {
		c.Network = other.Network
	}
	if other.Driver != "" {
		c.Driver = other.Driver
	}
	c.Vhost = c.Vhost || other.Vhost
	c.RDMA = c.RDMA || other.RDMA
	if len(other.Addresses) > 0 {
		c.Addresses = other.Addresses
	}
	if len(other.Routes) > 0 {
		c.Routes = other.Routes
	}
	return c
}

// ParseDeviceConfig decodes and checks opaque parameters. It is strict, because a misspelt vlan would put the pod
// into the wrong network: an unknown field, a wrong type, a bad value or trailing data is an error that names the
// field and what is allowed.
func ParseDeviceConfig(raw []byte) (DeviceConfig, error) {
	var p struct {
		PodIfName *string          `json:"podIfName"`
		Vlan      *json.RawMessage `json:"vlan"`
		Network   *string          `json:"network"`
		Driver    *string          `json:"driver"`
		Vhost     bool             `json:"vhost"`
		RDMA      bool             `json:"rdma"`
		Addresses *json.RawMessage `json:"addresses"`
		Routes    *json.RawMessage `json:"routes"`
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&p); err != nil {
		return DeviceConfig{}, describeDecodeError(err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return DeviceConfig{}, errors.New("data after the end of the parameters object")
	}
	if err := checkFieldNames(raw, parameterNames...); err != nil {
		return DeviceConfig{}, err
	}
	var cfg DeviceConfig
	var err error
	if p.Vlan != nil {
		var vlan int
		if err := json.Unmarshal(*p.Vlan, &vlan); err != nil {
			return DeviceConfig{}, fmt.Errorf("vlan: %.64s is not a whole number from 0 to %d", *p.Vlan, MaxVLAN)
		}
		if vlan < 0 || vlan > MaxVLAN {
			return DeviceConfig{}, fmt.Errorf("vlan: %d is not in 0..%d", vlan, MaxVLAN)
		}
		cfg.Vlan = &vlan
	}
	if p.PodIfName != nil {
		if err := ValidatePodIfName(*p.PodIfName); err != nil {
			return DeviceConfig{}, fmt.Errorf("podIfName: %w", err)
		}
		cfg.PodIfName = *p.PodIfName
	}
	if p.Network != nil {
		if err := ValidateNetworkName(*p.Network); err != nil {
			return DeviceConfig{}, fmt.Errorf("network: %w", err)
		}
		cfg.Network = *p.Network
	}
	if p.Driver != nil {
		if *p.Driver != DriverVFIO {
			return DeviceConfig{}, errDriver(*p.Driver)
		}
		cfg.Driver = *p.Driver
	}
	cfg.Vhost, cfg.RDMA = p.Vhost, p.RDMA
	if p.Addresses != nil {
		if cfg.Addresses, err = parseList("addresses", *p.Addresses, MaxAddresses, parseAddress); err != nil {
			return DeviceConfig{}, err
		}
	}
	if p.Routes != nil {
		if cfg.Routes, err = parseList("routes", *p.Routes, MaxRoutes, parseRoute); err != nil {
			return DeviceConfig{}, err
		}
	}
	return cfg, cfg.checkEntry()
}

func errDriver(name string) error {
	return fmt.Errorf("driver: %.64q is not %s, the only one that can be asked for", name, DriverVFIO)
}

func (c DeviceConfig) checkDriver() error {
	if c.Driver != "" && c.Driver != DriverVFIO {
		return errDriver(c.Driver)
	}
	return c.checkEntry()
}

// CheckTogether refuses parameters that do not go together. It is for all that is asked of a device; what each configuration of a
// request says alone may need others.
func (c DeviceConfig) CheckTogether() error {
	if err := c.checkEntry(); err != nil {
		return err
	}
	return c.checkByHand()
}

// checkEntry refuses what goes with nothing else.
func (c DeviceConfig) checkEntry() error {
	if c.Network != "" && c.Vlan != nil {
		return fmt.Errorf("vlan: %d cannot be asked for together with network %s, which says what the VLAN is; leave one of them out", *c.Vlan, c.Network)
	}
	if c.Driver != "" && c.PodIfName != "" {
		return fmt.Errorf("podIfName: %q cannot be asked for together with driver %s, which leaves no interface to name; leave one of them out", c.PodIfName, c.Driver)
	}
	if c.Driver != "" && (len(c.Addresses) > 0 || len(c.Routes) > 0) {
		what := "addresses"
		if len(c.Addresses) == 0 {
			what = "routes"
		}
		return fmt.Errorf("%s: cannot be asked for together with driver %s, which leaves no interface that could have them; leave one of them out", what, c.Driver)
	}
	if c.Driver != "" && c.RDMA {
		return fmt.Errorf("rdma: cannot be asked for together with driver %s, which takes the VF from the driver that has its RDMA device; leave one of them out", c.Driver)
	}
	return c.checkAddressing()
}

// checkFieldNames refuses names that encoding/json takes in another case or twice: with two spellings of vlan it
// would not be plain which one counts.
func checkFieldNames(raw []byte, allowed ...string) error {
	dec := json.NewDecoder(bytes.NewReader(raw))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return errors.New("parameters must be a JSON object")
	}
	seen := map[string]bool{}
	for dec.More() {
		t, err := dec.Token()
		if err != nil {
			return fmt.Errorf("decode parameters: %w", err)
		}
		name, _ := t.(string)
		switch {
		case !slices.Contains(allowed, name):
			return unknownFieldError(name, allowed)
		case seen[name]:
			return fmt.Errorf("field %q is given twice", name)
		}
		seen[name] = true
		var skip json.RawMessage
		if err := dec.Decode(&skip); err != nil {
			return fmt.Errorf("decode parameters: %w", err)
		}
		if string(skip) == "null" {
			return fmt.Errorf("%s: null is not a value; leave the field out", name)
		}
	}
	return nil
}

func unknownFieldError(name string, allowed []string) error {
	last := len(allowed) - 1
	return fmt.Errorf("unknown field %.64q, allowed are %s and %s", name, strings.Join(allowed[:last], ", "), allowed[last])
}

func describeDecodeError(err error) error {
	var typeErr *json.UnmarshalTypeError
	if errors.As(err, &typeErr) {
		if typeErr.Field == "" {
			return errors.New("parameters must be a JSON object")
		}
		return fmt.Errorf("%s: a JSON %s is not a %s", typeErr.Field, typeErr.Value, typeErr.Type)
	}
	if name, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
		return unknownFieldError(strings.Trim(name, `"`), parameterNames)
	}
	return fmt.Errorf("decode parameters: %w", err)
}

// ValidatePodIfName checks an interface name for use in a pod: what an interface can be called ([nic.ValidateName]), neither
// lo nor eth0, which every pod on the pod network has already, and neither all nor default, for which the kernel makes no
// settings (sysctl_dev_name_is_allowed).
func ValidatePodIfName(name string) error {
	switch name {
	case "lo", "eth0":
		return fmt.Errorf("%q is taken in every pod", name)
	case "all", "default":
		return fmt.Errorf("%q means every interface in the kernel's settings (/proc/sys/net/ipv4/conf)", name)
	}
	return nic.ValidateName(name)
}
